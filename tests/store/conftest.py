"""Failures within the suite are explained as those of test modules are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("shardwise.testing.store_suite")
