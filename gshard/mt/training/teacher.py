"""The teacher of a run that is distilled: its weights, and what identifies them."""

from __future__ import annotations

from pathlib import Path

from gshard.mt import atomic
from gshard.mt.config import DistillConfig
from gshard.mt.errors import UserError
from gshard.mt.run import Run
from gshard.mt.training import checksums, released
from gshard.mt.training.checkpoint import FOLDER
from gshard.mt.training.loading import chosen_step, load_model, model_like
from gshard.nn.config import TransformerConfig
from gshard.nn.strategy import Strategy
from gshard.nn.transformer import Transformer


def teacher_config(run: Run) -> TransformerConfig | None:
    """The teacher's model, whose vocabularies are those of `run`; None: there is no teacher."""
    found = _opened(run)
    return found.model_config if found else None


def teacher_of(run: Run, strategy: Strategy, *, shapes: bool = False) -> Transformer | None:
    """The teacher's weights, or only their shapes, in the shards that the strategy asks for."""
    found = _opened(run)
    if found is None:
        return None
    like = model_like(found.model_config, strategy)
    return like if shapes else load_model(found, run.config.distill.checkpoint, like)[0]


def teacher_identity(config: DistillConfig) -> str:
    """The checksum of a teacher's files: another teacher would give other losses."""
    if not config.teacher:
        return ""
    teacher = Run.open(config.teacher)
    if released.is_release(teacher):
        return atomic.checksum(teacher.folder / checksums.FILE)
    step = chosen_step(teacher, config.checkpoint)
    return atomic.checksum(teacher.folder / FOLDER / str(step) / checksums.FILE)


def _opened(run: Run) -> Run | None:
    folder = run.config.distill.teacher
    if not folder:
        return None
    if Path(folder).resolve() == run.folder.resolve():
        raise UserError(f"distill.teacher is {folder}, the run itself; it is another run")
    teacher = Run.open(folder)
    if teacher.tokenizer.digest != run.tokenizer.digest:
        raise UserError(
            f"the teacher {folder} has other vocabularies than {run.folder}: a student learns the "
            f"teacher's probabilities of every piece. With data.vocabulary={folder}/vocabulary it "
            "gets the teacher's"
        )
    return teacher
