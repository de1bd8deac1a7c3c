"""Compiled programs whose files are damaged: compiled anew, and never run."""

import importlib
import pickle
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.compilation_cache import compilation_cache

from gshard.mt import _jax
from gshard.mt._jax import CheckedCache, _checksum
from gshard.mt.training import kept
from tests.strangers import belongs_to_another


class Files:
    """As JAX keeps them: what is there is not written again."""

    def __init__(self, folder):
        self._path = folder

    def get(self, key):
        path = self._path / f"{key}-cache"
        return path.read_bytes() if path.exists() else None

    def put(self, key, value):
        path = self._path / f"{key}-cache"
        if not path.exists():
            path.write_bytes(value)


@given(value=st.binary(max_size=200), draw=st.randoms())
def test_an_entry_is_as_it_was_written_or_is_not_there(tmp_path_factory, value, draw):
    cache = CheckedCache(Files(tmp_path_factory.mktemp("programs")))
    assert cache.get("a") is None
    cache.put("a", value)
    assert cache.get("a") == value
    (file,) = cache._path.iterdir()
    data = bytearray(file.read_bytes())
    if draw.random() < 0.5:
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
    else:
        data = data[: draw.randrange(len(data))]
    file.write_bytes(data)
    assert cache.get("a") is None
    assert not file.exists()
    cache.put("a", value)
    assert cache.get("a") == value


def test_another_programs_entry_is_none(tmp_path):
    cache = CheckedCache(Files(tmp_path))
    cache.put("a", b"program")
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / file.name.replace("a", "b", 1))
    assert cache.get("b") is None


class TestFoldersOfOthers:
    """Whoever can write to the folder could have code run: an executable is a pickle."""

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
    def test_one_that_others_can_write_to_is_not_used(self, mode, tmp_path, capfd):
        place = tmp_path / "programs"
        place.mkdir()
        cache = Files(place)
        cache.put("a-checked", _checksum("a", b"evil") + b"evil")
        place.chmod(mode)
        for _ in range(2):
            assert CheckedCache(cache).get("a") is None
            CheckedCache(cache).put("b", b"ours")
        assert [path.name for path in place.iterdir()] == ["a-checked-cache"]
        assert capfd.readouterr().err == (
            f"gshard: compiled programs are not kept: {place}: can be written to by others "
            "(`chmod go-w` ends that)\n"
        )

    def test_one_of_another_user_is_not_used(self, tmp_path, monkeypatch, capfd):
        Files(tmp_path).put("a-checked", _checksum("a", b"evil") + b"evil")
        belongs_to_another(tmp_path, monkeypatch)
        assert CheckedCache(Files(tmp_path)).get("a") is None
        assert "belongs to another user" in capfd.readouterr().err

    @pytest.mark.parametrize("how", ["mode", "owner"])
    def test_an_entry_from_when_others_could_write_is_removed(self, how, tmp_path, monkeypatch):
        cache = CheckedCache(Files(tmp_path))
        cache.put("a", b"ours")
        assert cache.get("a") == b"ours"
        (file,) = tmp_path.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o666) if how == "mode" else belongs_to_another(file, monkeypatch)
        assert cache.get("a") is None
        assert not file.exists()

    def test_no_step_is_unpickled_from_it(self, tmp_path, monkeypatch, capfd):
        class Evil:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "executed",))

        place = tmp_path / "programs"
        place.mkdir()
        value = pickle.dumps((Evil(), ()))
        Files(place).put("a", value)
        Files(place).put("a-checked", _checksum("a", value) + value)
        monkeypatch.setattr(_jax, "program_cache", lambda backend: Files(place))
        place.chmod(0o777)
        assert kept.find("a", (), jax.devices()) is None
        assert not (tmp_path / "executed").exists()
        place.chmod(0o700)
        monkeypatch.setattr(_jax, "_is_own", lambda folder: True)
        assert kept.find("a", (), jax.devices()) is None
        assert (tmp_path / "executed").exists()  # so it would have been


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """JAX keeps all its programs here, checked."""
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    private = importlib.import_module("jax._src.compilation_cache")
    monkeypatch.setattr(private, "LRUCache", private.LRUCache)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _jax.wrap_program_cache(CheckedCache)
    made = private.LRUCache
    _jax.wrap_program_cache(CheckedCache)
    assert private.LRUCache is made  # twice is as once
    compilation_cache.reset_cache()  # an earlier test may have opened one elsewhere
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_flipped_bit_is_compiled_anew(folder):
    draw = random.Random(0)
    x = np.arange(12, dtype="f4").reshape(3, 4)

    def work():
        jax.clear_caches()
        return np.asarray(jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0))(x))

    want = work()
    whole = contents(folder)
    assert whole
    hits = []

    def listen(name, **_):
        hits.append(name)

    jax.monitoring.register_event_listener(listen)
    for _ in range(5):
        for file in folder.iterdir():
            data = bytearray(file.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        hits.clear()
        np.testing.assert_array_equal(work(), want)
        assert "/jax/compilation_cache/cache_hits" not in hits
        hits.clear()
        np.testing.assert_array_equal(work(), want)
        assert "/jax/compilation_cache/cache_hits" in hits  # it was mended
    assert contents(folder).keys() == whole.keys()
    jax.monitoring.unregister_event_listener(listen)
