"""Models for tests run for milliseconds, except where they learn languages."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
    if not request.module.__name__.endswith("test_languages"):
        request.getfixturevalue("compile_quickly")
