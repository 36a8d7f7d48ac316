"""Agents use the endpoint, profile and account of the training, not of their own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.kernel.errors import StoreError
from shardwise.parts.stores.remote import open_absolute


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment with two profiles, one of which has an endpoint."""
    config = tmp_path / "config"
    config.write_text(
        "[profile plain]\nregion = eu-central-1\n"
        "[profile local]\nendpoint_url = http://127.0.0.1:9\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "url", "expected"),
    [
        ({}, "s3://b/run", "s3://b/run"),
        ({"AWS_PROFILE": "plain"}, "s3://b/run", "s3://b/run?profile=plain"),
        (
            {"AWS_PROFILE": "local"},
            "s3://b/run",
            "s3://b/run?endpoint=http://127.0.0.1:9&profile=local",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:8"},
            "s3://b/run?lock_seconds=9",
            "s3://b/run?lock_seconds=9&endpoint=http://127.0.0.1:8",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:8"},
            "s3://b/run?endpoint=http://127.0.0.1:7",
            "s3://b/run?endpoint=http://127.0.0.1:7",
        ),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "one"}, "az://c/run", "az://c/run?account=one"),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "one"}, "az://c/run?account=two", "az://c/run?account=two"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:8"}, "gs://b/run", "gs://b/run"),
    ],
)
def test_the_url_gets_what_the_environment_adds(
    aws: pytest.MonkeyPatch, environment: dict[str, str], url: str, expected: str
) -> None:
    aws.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for name, value in environment.items():
        aws.setenv(name, value)
    assert str(open_absolute(url)) == expected
    assert str(open_absolute(expected)) == expected


def test_missing_credentials_are_told(aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        aws.delenv(name, raising=False)
    aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    aws.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="no credentials for S3 were found: set AWS_ACCESS"):
        open_absolute("s3://b/run?endpoint=http://127.0.0.1:9").list()
