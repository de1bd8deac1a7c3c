"""`import gshard` is cheap, and what it imports later is what it was before."""

import subprocess
import sys

import pytest


def python(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_gshard_imports_no_jax():
    assert python("import gshard, gshard.nn, sys; print('jax' in sys.modules)") == "False"


def test_the_command_imports_translation_only_where_it_is_used():
    program = "import gshard.cli, sys; print([m for m in sys.modules if m.startswith('gshard.mt')])"
    assert python(program) == "[]"


@pytest.mark.parametrize(
    "before",
    ["", "import gshard.jit, gshard.check\nfrom gshard.autosharding import layout"],
)
def test_functions_are_not_hidden_by_modules_of_their_name(before):
    """`gshard.jit` is a module too, which importing it binds to the package."""
    program = f"import gshard\n{before}\nprint(gshard.jit.__name__, gshard.check.__name__)"
    assert python(program) == "jit check"


def test_names_that_are_not_there():
    program = "import gshard.nn\nprint(hasattr(gshard, 'shart'), hasattr(gshard.nn, 'Transfomer'))"
    assert python(program) == "False False"


def test_a_registered_rule_replaces_the_built_in_one():
    """Also where nothing else of gshard was used before, so that its own rules come first."""
    program = (
        "from jax.extend.core.primitives import sin_p\n"
        "from gshard.extend import register_rule\n"
        "register_rule(sin_p, 'a -> a')\n"
        "from gshard.rules.base.rule import RULES\n"
        "mine = RULES[sin_p]\n"
        "import gshard\n"
        "gshard.jit\n"
        "print(RULES[sin_p] is mine)\n"
    )
    assert python(program) == "True"
