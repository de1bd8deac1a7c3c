"""Folders of runs as training and evaluation leave them, with made-up numbers."""

import json
import math
import random

_CODES = """
    pt es fr de ru it zh pl uk ja sv ca nl cs zh_Hant da tr hu sr ko sk fi el sl gl id eu nb vi bg
    et ro lt ar hr he lv be bs nn eo fa th is kk ka hi ta bn ms mr sq pa te oc km ga ml gu mk cy af
    ne kn ast ia az gd ug nds as br hy dz or fur ur tg si am fy uz mn mai my an kab fil xh hsb om
    sw ku szl dsb sc wa ie ky hne gn ks mni rm ckb sat
"""
LANGUAGES = _CODES.split()
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.4.3"
GROUPS = ("high", "mid", "low")
SENTENCES = {
    "de": ("Die Datei konnte nicht geöffnet werden.", "The file could not be opened."),
    "ar": (
        "تعذر فتح الملف المطلوب من الخادم.",
        "Could not open the requested file from the server.",
    ),
    "ja": ("選択した項目をすべて削除しますか。", "Do you want to delete all selected items?"),
    "ru": ("Введите имя нового пользователя.", "Enter the name of the new user."),
}


def pairs(rank):
    """A power law from 91,157 pairs down to 310."""
    return round(91_157 * math.exp(-5.7 * (rank / (len(LANGUAGES) - 1)) ** 1.25))


def group(rank):
    quarter = len(LANGUAGES) // 4
    return "high" if rank < quarter else "low" if rank >= len(LANGUAGES) - quarter else "mid"


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def manifest(folder):
    train = {
        name: {"train": {"pairs": pairs(rank)}, "test": {"pairs": 100}}
        for rank, name in enumerate(LANGUAGES)
    }
    write(folder / "manifest.json", {"version": 1, "languages": train})


def config(experts, steps, corpus, layers=4):
    model = {"encoder_layers": layers, "decoder_layers": layers, "model_dim": 256}
    model |= {"hidden_dim": 1024, "heads": 8, "experts": experts}
    return {
        "name": "run",
        "data": {"corpus": str(corpus)},
        "model": model,
        "train": {"steps": steps},
        "devices": {"count": 8},
    }


def metrics(steps, floor, experts, seed, every=20, speed=9_000):
    """Lines of a run whose loss falls to `floor` like a power of the step."""
    draw = random.Random(seed)
    for step in range(every, steps + 1, every):
        loss = floor + 7.2 * (1 + step / 60) ** -0.62
        tokens = step * 2_050
        line = {
            "kind": "train",
            "step": step,
            "loss": loss + 0.12,
            "nll": loss + draw.gauss(0, 0.06),
            "aux_loss": 0.011,
            "grad_norm": 0.6 + 3 * math.exp(-step / 200) + abs(draw.gauss(0, 0.1)),
            "tokens": tokens,
            "tokens_per_second": speed * draw.uniform(0.96, 1.03),
            "share_of_matmul": 0.31 * draw.uniform(0.96, 1.03),
            "skipped": int(step > steps * 0.4) + int(step > steps * 0.7),
            "padding": 0.021,
            "data_wait": 0.002 + 0.02 * math.exp(-step / 100),
            "seconds": tokens / speed,
        }
        if experts:
            line["overflow"] = 0.02 + 0.4 * math.exp(-step / 300) + abs(draw.gauss(0, 0.004))
            line["balance"] = min(1, 0.75 - 0.5 * math.exp(-step / 250) + draw.gauss(0, 0.015))
        yield line
        if step % 500 == 0:
            clocks = {"step": step, "tokens": tokens, "seconds": tokens / speed}
            yield {"kind": "dev", "nll": loss + 0.05 + draw.gauss(0, 0.01), **clocks}


def scores(lift, seed):
    """The tasks of an evaluation, better by `lift` where there is much text."""
    draw = random.Random(seed)
    tasks = {}
    for rank, name in enumerate(LANGUAGES):
        richness = 1 - rank / len(LANGUAGES)
        bleu = 11 + 17 * richness + lift * (0.5 + richness) + draw.gauss(0, 2.2)
        tasks[f"{name}-en"] = {
            "language": name,
            "target": "en",
            "sentences": 500 if rank < 80 else 40 + rank,
            "train_pairs": pairs(rank),
            "group": group(rank),
            "bleu": round(bleu, 3),
            "chrf": round(bleu + 20 + draw.gauss(0, 1), 3),
            "copy_bleu": round(abs(draw.gauss(2.4, 1.2)), 3),
            "copy_chrf": 11.5,
            "nearest_bleu": 9.25,
            "untrained_bleu": 0.012,
        }
    return tasks


def averages(tasks):
    found = {}
    for name in ("all", *GROUPS):
        mine = [task for task in tasks.values() if name in ("all", task["group"])]
        found[name] = {"tasks": len(mine)}
        for key in ("bleu", "chrf", "copy_bleu", "nearest_bleu", "untrained_bleu"):
            found[name][key] = sum(task[key] for task in mine) / len(mine)
    return found


def shares(experts, layers, seed):
    """Loads in which neighbours in the list of languages are alike, more so in deep layers."""
    draw = random.Random(seed)
    found = {}
    for side in ("encoder", "decoder"):
        likes = [[draw.gauss(0, 1) for _ in range(experts)] for _ in range(6)]
        found[side] = {}
        for name in LANGUAGES:
            like = likes[draw.randrange(6)]
            rows = []
            for layer in range(layers):
                strength = 0.35 * (layer + 1)
                weights = [math.exp(strength * x + draw.gauss(0, 0.15)) for x in like]
                rows.append([weight / sum(weights) for weight in weights])
            found[side][f"{name}-en"] = rows
    return found


def evaluation(tasks, experts, step, weights, seed):
    draw = random.Random(seed)
    examples = []
    for name in LANGUAGES:
        source, reference = SENTENCES.get(name, (f"{name} " * 6, "Some sentence in English."))
        for n in range(4):
            words = [word for word in reference.split() if draw.random() < 0.85]
            examples.append(
                {
                    "task": f"{name}-en",
                    "source": f"{source} {n}",
                    "reference": reference,
                    "translation": " ".join(words),
                    "score": round(-draw.random(), 4),
                    "chrf": round(100 * len(words) / len(reference.split()), 2),
                }
            )
    value = {"version": 1, "run": "x", "checkpoint": step, "split": "test", "beam": 4}
    value |= {"alpha": 0.6, "seconds": 840.5, "weights": weights, "tasks": tasks}
    value |= {"signatures": {"bleu": SIGNATURE, "chrf": SIGNATURE + "|nw:2"}}
    value |= {"averages": averages(tasks), "examples": examples}
    if experts:
        value["experts"] = shares(experts, 2, seed)
    return value


def baselines(seed=7):
    draw = random.Random(seed)
    tasks = {}
    for rank, name in enumerate(LANGUAGES):
        richness = 1 - rank / len(LANGUAGES)
        bleu = max(0.3, 4 + 25 * richness**1.3 + draw.gauss(0, 2))
        about = {"train_pairs": pairs(rank), "weights": 4_000_000, "steps": 2000}
        tasks[f"{name}-en"] = {"bleu": round(bleu, 3), "chrf": round(bleu + 18, 3), **about}
    value = {"version": 1, "seconds": 5100.0, "tasks": tasks}
    return value | {"signatures": {"bleu": SIGNATURE}}


def write_metrics(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def make(folder):
    """Four runs: with 16 experts and baselines, dense, unfinished and not evaluated, damaged."""
    manifest(folder / "corpus")
    moe, dense, young, broken = (folder / name for name in ("moe-16", "dense", "young", "broken"))
    write(moe / "config.json", config(16, 12_000, folder / "corpus"))
    write_metrics(moe, metrics(12_000, 1.62, 16, 1))
    write(moe / "evaluation.json", evaluation(scores(6.0, 1), 16, 12_000, 41_300_000, 1))
    write(moe / "baselines.json", baselines())
    write(dense / "config.json", config(0, 12_000, folder / "corpus"))
    write_metrics(dense, metrics(12_000, 1.88, 0, 2, speed=11_500))
    measured = evaluation(scores(1.0, 2), 0, 11_500, 11_800_000, 2)
    del measured["tasks"]["fr-en"]["bleu"]  # as if it could not be measured
    write(dense / "evaluation.json", measured)
    write(young / "config.json", config(8, 20_000, folder / "corpus"))
    write_metrics(young, metrics(4_200, 1.7, 8, 3))
    write_metrics(broken, metrics(3_000, 1.9, 8, 4))
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3020, "nll": NaN}\n{"kind": "trai')
    (broken / "evaluation.json").write_text('{"version": 1, "tasks": {"de-en"')
    (broken / "config.json").write_bytes(b"\xff\xfe broken")
    return moe, dense, young, broken
