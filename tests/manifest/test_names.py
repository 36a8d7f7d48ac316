"""Names of files: made here, taken apart here, and refused if a manifest has others."""

from __future__ import annotations

import pytest

from shardwise.errors import FormatError
from shardwise.manifest import names


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 123_456_789_012])
def test_a_step_is_found_in_its_directory(step: int) -> None:
    assert names.step_of_directory(names.step_directory(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-1", "step-000000001", "step-0000000x", "xstep-00000001", "step-00000001.tmp", "step-"],
)
def test_other_directories_are_no_steps(name: str) -> None:
    assert names.step_of_directory(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../secret",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "a\0b",
        ".hidden",
        "-rf",
        "a b",
        "a\n",
        "naïve",
        "a" * 201,
        "manifest.json",
    ],
)
def test_a_file_that_is_no_plain_component_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="not safe to open"):
        names.check_file_name(name)


def test_what_a_save_makes_is_known_again() -> None:
    save_id = names.new_save_id()
    assert names.check_save_id(save_id) == save_id
    assert names.new_save_id() != save_id
    for name in (names.data_file(3, save_id), names.data_file(123_456, save_id)):
        assert names.check_file_name(name) == name
        assert names.is_file_of_save(name)
    assert names.is_file_of_save(names.lock_file(save_id))
    assert names.is_lock_file(names.lock_file(save_id))
    assert names.is_file_of_save(f".{names.MANIFEST}.0123abcd")


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "model.safetensors", "r1-0000000000000000.safetensors", "notes.txt", ".git"],
)
def test_what_others_make_is_not_ours_to_remove(name: str) -> None:
    assert not names.is_file_of_save(name)


@pytest.mark.parametrize("save_id", ["", "0" * 15, "0" * 17, "G" * 16, "0123456789abcde\n"])
def test_a_save_id_is_hexadecimal(save_id: str) -> None:
    with pytest.raises(FormatError, match="save_id"):
        names.check_save_id(save_id)
