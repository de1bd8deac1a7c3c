"""What a test shows about `gshard.jit` in the place of `jax.jit`: rows of docs/reference/jit.md."""

from collections.abc import Callable

SHOWN: dict[str, str] = {}  # a keyword, a transformation or a habit -> the test that shows it


def shows(*features: str) -> Callable[[Callable], Callable]:
    """Mark a test as the one that shows that these work as with `jax.jit`."""

    def mark(test: Callable) -> Callable:
        for feature in features:
            assert feature not in SHOWN, f"{feature} is shown by {SHOWN[feature]} already"
            SHOWN[feature] = f"{test.__module__.removeprefix('tests.')}.{test.__name__}"
        return test

    return mark
