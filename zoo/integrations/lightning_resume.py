"""The random state of a run of Lightning's, and a run that goes on from it.

Lightning's own checkpoints lack the random state. A loader's iterator draws its seed, and with
workers the order of its batches, as it is made, and Lightning makes that of a resumed run before
any hook could set the state. So the iterator is made anew:

    resumed behind an epoch     on_train_epoch_start: the state of the checkpoint
                                before the first batch: a new iterator
    resumed within an epoch     before the first batch: the state of the epoch's start, a new
                                iterator, whose first batches are passed over, the state of the
                                checkpoint
    resumed within the first    on_fit_start: the state of the epoch's start
                                before the first batch: the first batches are passed over, the state
                                of the checkpoint

A loader that has a state of its own, as torchdata's, resumes by itself. What no state of this
process shows is not restored: the streams of workers that persist over epochs, and within an epoch
what a loader without a length draws here, one batch ahead.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn

from zoo._torch import pytree
from zoo.engine.devices import read_streams, set_streams
from zoo.errors import shortened


class RandomState(NamedTuple):
    """The states of all global random streams, and of the generators of the loaders."""

    streams: dict[str, Any]
    generators: list[torch.Tensor]

    @classmethod
    def read(cls, trainer: Any) -> "RandomState":
        """Reads the state, in types that `torch.load(weights_only=True)` admits."""
        streams = {name: _plain(state) for name, state in read_streams().items()}
        return cls(streams, [generator.get_state() for generator in _generators(trainer)])

    def restore(self, trainer: Any) -> None:
        """Sets the state."""
        set_streams(self.streams)
        for generator, state in zip(_generators(trainer), self.generators, strict=False):
            generator.set_state(state)


class Resumption:
    """Knows the random state of a run, and puts that of a checkpoint in force as it goes on."""

    def __init__(self) -> None:
        self._trainer: Any = None
        # of the checkpoint, until a batch of the resumed run is read
        self._resumed: RandomState | None = None
        # of the epoch's start; and from which Lightning made its iterator, if ahead of that
        self._start: RandomState | None = None
        self._first: RandomState | None = None
        self._has_begun_epoch = False
        self._begin: Callable[[Any], None] | None = None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint needs."""
        state = RandomState.read(self._trainer)._asdict()
        more = {"start": self._start, "first": self._first}
        return state | {name: one and one._asdict() for name, one in more.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Remembers the state of a checkpoint."""
        try:
            self._resumed = RandomState(dict(state["streams"]), state.get("generators", []))
            start, first = state.get("start"), state.get("first")
            self._start, self._first = (
                start and RandomState(**start),
                first and RandomState(**first),
            )
        except (KeyError, TypeError, AttributeError):
            rank_zero_warn(
                "the checkpoint was saved with another version of zoo, whose random state this one "
                f"does not read ({shortened(state)}): the run goes on with other random numbers "
                "than one that was not stopped"
            )

    def begin_fit(self, trainer: Any) -> None:
        """Sets the state that the iterator of the first epoch is made from (on_fit_start)."""
        self._trainer = trainer
        self._has_begun_epoch = False
        if self._resumed is None:
            self._start, self._first = RandomState.read(trainer), None
        elif self._first is not None:
            self._first.restore(trainer)

    def watch(self, trainer: Any) -> None:
        """Lets epochs begin with their iterators (on_train_start)."""
        self._begin = trainer.fit_loop.epoch_loop.on_run_start
        trainer.fit_loop.epoch_loop.on_run_start = self._begin_epoch

    def unwatch(self) -> None:
        """Leaves the loop as it was."""
        if self._begin is not None:
            del self._trainer.fit_loop.epoch_loop.on_run_start
        self._begin = None

    def begin_epoch(self) -> None:
        """Sets the state of a checkpoint, which may be of an epoch's end (on_train_epoch_start)."""
        self._has_begun_epoch = True
        if self._resumed is not None:
            self._resumed.restore(self._trainer)

    def _begin_epoch(self, fetcher: Any) -> None:
        """Begins to read an epoch's batches, from those that are left."""
        loader, progress = fetcher.combined_loader, self._trainer.fit_loop.epoch_loop.batch_progress
        ready, iterator = progress.current.ready, loader._iterator
        here = RandomState.read(self._trainer)
        assert self._begin is not None, "it was called in its place"
        self._begin(fetcher)
        is_new = loader._iterator is not iterator
        if self._resumed is None:
            self._first = None if is_new else self._start
            self._start = here
            return
        if 0 < ready < self._trainer.num_training_batches:
            if self._start is not None:
                self._start.restore(self._trainer)
                _renew(fetcher, ready, is_made=self._first is not None)
            self._resumed.restore(self._trainer)
        elif ready:
            # the epoch is over but for its validation
            self._resumed.restore(self._trainer)
        else:
            if not self._has_begun_epoch:
                # Lightning calls no on_train_epoch_start behind the checkpoint of a last batch
                self._resumed.restore(self._trainer)
                here = self._resumed
            self._start, self._first = here, None
            if not is_new:
                _renew(fetcher, 0)
        self._resumed = None


def _renew(fetcher: Any, passed: int, is_made: bool = False) -> None:
    """Makes the iterator anew, unless it is made, and passes over batches."""
    loaders = fetcher.combined_loader.flattened
    if all(hasattr(loader, "load_state_dict") for loader in loaders):
        return
    if not hasattr(fetcher, "prefetch_batches"):
        rank_zero_warn(
            "a training_step that takes dataloader_iter reads its batches by itself: the resumed "
            "run reads others than one that was not stopped"
        )
        return
    if is_made:
        # Lightning counts those before the checkpoint already
        fetcher.fetched -= passed
    else:
        iter(fetcher)
    for _ in range(passed):
        next(fetcher)


def _generators(trainer: Any) -> Iterator[torch.Generator]:
    """Yields the generators of a trainer's loaders and of their samplers, each once."""
    seen = set[int]()
    for loader in pytree.tree_leaves(None if trainer is None else trainer.train_dataloader):
        for owner in (loader, getattr(loader, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator


def _plain(state: Any) -> Any:
    """Returns a random state with lists for NumPy's arrays."""
    if not isinstance(state, tuple):
        return state
    return tuple(part.tolist() if hasattr(part, "tolist") else part for part in state)
