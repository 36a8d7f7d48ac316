"""Rewrite the assertions of the conformance suite of stores, as in test modules."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("shardwise.testing.store_suite", "tests.store.remote_files_suite")
