"""A corpus gathered on Ray is the one gathered here, byte for byte."""

import pytest

from gshard.mt.data.gather import GatherConfig, gather
from gshard.mt.data.splits import HeldOutShares
from gshard.mt.data.user_text import parse_own
from tests.mt.samples import sentence, translated

pytest.importorskip("ray.data")
pytestmark = pytest.mark.slow  # a cluster is started


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Three files that repeat each other, one of them given to test."""
    folder, found = tmp_path_factory.mktemp("text"), []
    for number, (kind, first) in enumerate((("", 0), ("", 150), ("test=", 400))):
        lines = [
            f"{language}\t{translated(n, language)}\t{sentence(n)}\n"
            for language in ("de", "ru")
            for n in range(first, first + 300 - 100 * number)
        ]
        (folder / f"{number}.tsv").write_text("".join(lines), encoding="utf-8")
        found.append(parse_own("tsv", f"{kind}{folder / f'{number}.tsv'}"))
    return tuple(found)


def contents(folder):
    places = [*folder.glob("corpus-*/**/*.parquet"), folder / "manifest.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in places}


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_one_and_four_workers_write_the_same_bytes(own, tmp_path):
    import ray

    shares = HeldOutShares(0.1, 0.1)
    gather(GatherConfig(tmp_path / "here", own=own, shares=shares, jobs=1))
    expected = contents(tmp_path / "here")
    assert len(expected) == 7
    ray.init(num_cpus=2, log_to_driver=False)
    try:
        from gshard.mt.launch.ray_cluster import connect

        connect()
        for workers in (1, 4):
            place = tmp_path / str(workers)
            gather(GatherConfig(place, own=own, shares=shares, jobs=workers, ray=True))
            assert contents(place) == expected
    finally:
        ray.shutdown()
