"""`gshard doctor` and `python -m gshard`."""

import json
import subprocess
import sys

import jax

import gshard
from gshard.commands import doctor


def test_it_names_versions_devices_and_extras(monkeypatch):
    jax.devices()  # XLA has read its flags
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_a_test")
    monkeypatch.setenv("SECRET_TOKEN", "not to be shown")
    found = doctor.report()
    assert found["versions"]["gshard"] == gshard.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"].startswith(f"{len(jax.devices())} x cpu")
    assert found["extras"]["nn"] == "complete"
    assert found["environment"]["XLA_FLAGS"] == "--xla_of_a_test"
    assert "SECRET_TOKEN" not in json.dumps(found)


def test_an_extra_that_lacks_a_package_says_so(monkeypatch):
    required = ['equinox>=1; extra == "nn"', 'no-such-package; extra == "nn"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    assert doctor._extras() == {"nn": "lacks no-such-package"}
    required += ['gshard[nn,numpy]; extra == "all"', 'numpy; extra == "numpy"']
    assert doctor._extras() == {
        "all": "lacks no-such-package",
        "nn": "lacks no-such-package",
        "numpy": "complete",
    }


def test_a_folder_of_programs_has_its_size(tmp_path):
    (tmp_path / "program").write_bytes(b"x" * 200)
    assert doctor._size(tmp_path) == 200


def test_the_package_runs_as_the_command():
    asked = [sys.executable, "-m", "gshard", "doctor", "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["versions"]["gshard"] == gshard.__version__
