"""End-to-end tests: real vLLM engines in processes of their own, real NIXL between them."""

import pytest

pytest.register_assert_rewrite("tests.e2e.handoff", "tests.e2e.streamchecks")
