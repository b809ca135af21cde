r"""CapturableGuidedDecoder: guided decoding inside a CUDA graph, where Python does not run.

In:  the calls of `GuidedDecoder`, eagerly or under capture; per step one `add_batch` ahead of the forward pass or replay.
Out: the same masks on the logits; failures, to be taken once the batch has synchronised.

The grammar work of a step is one host function on the side stream, a node of the graph when captured:

    main  --o-- forward pass ------------------o-- apply --      o  an event between the streams
             \                                /
    side      o-- host function -- copy rows -o                  a rollback is the same without a copy

There is one staging buffer, at a fixed address for the graph's copy. The host function that rewrites it comes behind the
copy before it on the same side stream; the device rows wait for their last reader by token_event. Batches reach the host
function by a queue (see gd_plugin.decoding.callbacks), tokens by a copy on the main stream. Every stream that is forked
off is joined again.

A host function needs the interpreter lock. Whoever waits for the device and keeps the lock would wait for ever, so each
call that has launched one ends by waiting for it without the lock (`drain`), never during capture.
"""

import atexit
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.decoding.attaching import MatcherFactory
from gd_plugin.decoding.building import BatchBuilder, Failures
from gd_plugin.decoding.callbacks import NUM_TICKETS, StepCallbacks
from gd_plugin.decoding.decoder import GuidedDecoder
from gd_plugin.decoding.hostfunc import HostFunctionHandle, open_host_functions
from gd_plugin.decoding.precompiled import PreparedAttaching, Preparing
from gd_plugin.decoding.requests import GuidedRequest
from gd_plugin.decoding.rows import RowWriter
from gd_plugin.decoding.tokens import Step, check_verified
from gd_plugin.errors import GuidedDecodingError
from gd_plugin.masks.device import MaskDevice
from gd_plugin.masks.shard import VocabShard

__all__ = ["CapturableGuidedDecoder"]


class CapturableGuidedDecoder(GuidedDecoder):
    """A `GuidedDecoder` whose calls may be captured in a CUDA graph and replayed. Not thread-safe.

    What differs:
        Guides must be compiled ahead by `submit`: a host function cannot compile.
        `add_batch` comes before each forward pass or replay, never inside a capture. A replay that finds no new batch, as
        during warm-up, changes nothing.
        Calls under capture return no failures; `take_failures` does, once the batch has synchronised. Failures with the
        request id None are of every guided request of their batch.
        An eager step without a guided request enqueues nothing.

    Args:
        factory: as all arguments not listed here, see `GuidedDecoder`.
        device: see `GuidedDecoder`; or an object that is a `MaskDevice` and a `HostFunctionDevice`.
        spin: have the device spin for host functions instead of sleeping (CUDA 13): faster, takes a core.
        force_eager: run functions compiled by torch.compile eagerly, in the whole process, until `close`: for versions
            of torch whose compiled code launches kernels with the interpreter lock held.

    Raises:
        ValueError: see `GuidedDecoder`.
        GuidedDecodingError: a CUDA device was asked for and there is none, or no driver library can be loaded.
    """

    # a captured copy always reads the same buffer
    _num_host_buffers = 1

    def __init__(
        self,
        factory: MatcherFactory,
        *,
        max_num_sequences: int,
        vocab_size_padded: int,
        max_num_draft_tokens: int = 0,
        device: torch.device | str | MaskDevice | None = None,
        shard: VocabShard | None = None,
        draft_shard: VocabShard | None = None,
        group: Any = None,
        config: GuidedDecodingConfig | None = None,
        max_look_ahead: int = 0,
        defer: bool = False,
        spin: bool = False,
        force_eager: bool = False,
    ) -> None:
        super().__init__(
            factory,
            max_num_sequences=max_num_sequences,
            vocab_size_padded=vocab_size_padded,
            max_num_draft_tokens=max_num_draft_tokens,
            device=device,
            shard=shard,
            draft_shard=draft_shard,
            group=group,
            config=config,
            max_look_ahead=max_look_ahead,
            defer=defer,
        )
        self._host_functions = open_host_functions(self._device, spin=spin)
        self._attaching = self._preparing = Preparing(
            factory, max_num_sequences, self._config.compile_timeout_s, group, defer
        )
        prepared = PreparedAttaching(self._slots)
        self._builder = BatchBuilder(
            self._slots,
            prepared,
            open_rows=self._config.rows_behind_refused_draft == "open",
            speculates=max_num_draft_tokens > 0,
        )
        staging = self._buffers.host[0]
        self._announced = self._device.empty_host(1)
        tickets = self._device.empty(NUM_TICKETS)
        tickets.copy_(torch.arange(NUM_TICKETS, dtype=torch.int32))
        # a view takes longer to make than to look up
        self._tickets = tickets.split(1)
        self._callbacks = StepCallbacks(
            self._build_step, self._builder, self._tokens, staging, prepared, self._announced.numpy()
        )
        self._host_reads = (*self._tokens.host, self._announced)
        self._on_error = self._callbacks.failed
        # every host function may rewrite the rows: one that fails switches them off
        self._host_writes = (staging.flat,)
        self._drained = self._device.event()
        self._is_forked = False
        # host functions captured outside `capturing` live as long as the decoder is not closed
        self._own_handle = self._handle = HostFunctionHandle()
        self._handles: weakref.WeakSet[HostFunctionHandle] = weakref.WeakSet([self._own_handle])
        self._on_close = ExitStack()
        if force_eager:
            self._on_close.enter_context(torch.compiler.set_stance("force_eager"))
        _open.add(self)

    @property
    def active(self) -> bool:
        """Whether the batch at hand has a guided request. A captured step works on any batch."""
        return next(self.requests.valid_requests(), None) is not None

    # capture and what belongs to it ---------------------------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[HostFunctionHandle]:
        """Give the host functions that the block captures to a handle: keep it as long as their graph, then drop it.

        If the block raises, its host functions are forgotten.
        """
        handle = self._handle = HostFunctionHandle()
        self._handles.add(handle)
        self._is_forked = False
        try:
            yield handle
        except BaseException:
            handle.release()
            raise
        finally:
            self._handle = self._own_handle

    def record_token_event(self) -> None:
        """Let the next call's grammar work begin here: the first thing inside a capture, before the forward pass.

        Without it a captured step's grammar work begins behind the forward pass.
        """
        self._device.record(self._buffers.token_event, self._device.main())
        self._is_forked = True

    def drain(self) -> None:
        """Wait, without the interpreter lock, for the host function and copy launched last; nothing during capture."""
        if not self._device.is_capturing():
            self._device.synchronize(self._buffers.bitmask_event)

    def drain_captured_host_functions(self) -> None:
        """Wait, without the interpreter lock, for all that is on the main stream, if it can hold captured host functions.

        Call it behind replays, ahead of anything that may wait for the device with the lock held. Nothing during capture.
        """
        if any(map(len, self._handles)) and not self._device.is_capturing():
            self._wait_for_main()

    def _wait_for_main(self) -> None:
        self._device.record(self._drained, self._device.main())
        self._device.synchronize(self._drained)

    def take_failures(self, synchronized: Collection[object], active: Collection[object] | None = None) -> Failures:
        """Return what failed in batches that have synchronised.

        Args:
            synchronized: request ids of those batches. Their failures, and those with id None, are returned.
            active: request ids that are still running; failures of the others among them are kept, and those of
                requests that are not are dropped. None keeps all.
        """
        return self._callbacks.take_failures(synchronized, active)

    def close(self) -> None:
        """Wait for pending work and forget all captured host functions. Graphs that hold them cannot be replayed.

        Raises:
            GuidedDecodingError: it is called inside a capture; nothing is closed.
        """
        if self._device.is_capturing():
            raise GuidedDecodingError("close() was called inside a capture; end the capture first")
        if any(map(len, self._handles)):
            self._wait_for_main()
        for handle in list(self._handles):
            handle.release()
        self._on_close.close()

    # the calls of GuidedDecoder -------------------------------------------------------------------------------------

    def add_batch(
        self,
        requests: list[GuidedRequest],
        new_tokens: torch.Tensor | None = None,
        runtime_draft_len: int | None = None,
    ) -> None:
        """See `GuidedDecoder.add_batch`. The batch is handed to the next host function by a queue.

        Raises:
            GuidedDecodingError: it is called inside a capture.
        """
        if self._device.is_capturing():
            raise GuidedDecodingError("add_batch was called inside a capture; call it ahead of each replay")
        super().add_batch(requests, new_tokens, runtime_draft_len)

    def _enqueue(self, step: Step) -> None:
        super()._enqueue(step)
        if step.draft_step is not None:
            return
        ticket = self._callbacks.put(step, self._preparing.matchers)
        self._preparing.matchers = {}
        device, main = self._device, self._device.main()
        device.copy(self._announced, self._tickets[ticket], main)
        # behind replays too, which an eager step's copy has to wait for and of which nothing here knows
        device.record(self._buffers.token_event, main)

    def build(self) -> Failures:
        """See `GuidedDecoder.build`. Returns [] under capture."""
        if self._is_idle():
            return []
        try:
            self._launch_build(None)
            self._join()
        finally:
            self.drain()
        return self._returned()

    def execute(self, logits: torch.Tensor | None, d2t: torch.Tensor | None = None) -> Failures:
        """See `GuidedDecoder.execute`. Returns [] under capture."""
        if logits is not None:
            self._check_logits(logits, self.requests.num_bitmask_tokens, d2t)
        if self._is_idle():
            return []
        try:
            self._launch_build(d2t)
            if logits is None:
                self._join()
            else:
                self._buffers.copy_in_turn(self.requests.num_bitmask_tokens)
                self.apply_bitmask(logits, d2t)
        finally:
            self.drain()
        return self._returned()

    def rollback_rejected_batch(
        self, num_accepted_tokens: torch.Tensor, accepted_nodes: torch.Tensor | None = None
    ) -> Failures:
        """See `GuidedDecoder.rollback_rejected_batch`. Returns [] under capture."""
        batch_size, draft_len = len(self._step.target), self._step.target.max_num_draft_tokens
        check_verified(num_accepted_tokens, accepted_nodes, batch_size)
        num_nodes = None if accepted_nodes is None else accepted_nodes.shape[1]
        if num_nodes is not None and num_nodes > self._max_num_draft_tokens:
            raise ValueError(
                f"accepted_nodes must be [{batch_size}, L], L <= {self._max_num_draft_tokens}, got L {num_nodes}"
            )
        if draft_len == 0 or self._is_idle():
            return []
        self._tokens.copy_num_emitted(num_accepted_tokens, accepted_nodes)
        return self._run(partial(self._callbacks.rollback_batch, num_nodes))

    def rollback_rejected_tokens(self) -> Failures:
        """See `GuidedDecoder.rollback_rejected_tokens`. A missing count is a failure of the batch, with the id None."""
        step = None if self._device.is_capturing() else self._step
        return self._run(partial(self._callbacks.rollback_requests, step))

    def rollback_draft_tokens(self) -> None:
        """See `GuidedDecoder.rollback_draft_tokens`."""
        self._run(self._callbacks.rollback_drafts)

    def init_disagg_gen_requests(self) -> None:
        """See `GuidedDecoder.init_disagg_gen_requests`. Nothing under capture: a step attaches by itself."""
        if not self._device.is_capturing():
            self._run(partial(self._callbacks.init_arrivals, self._step))

    # order on the device --------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        """Tell whether this call has nothing to do, and take the batch out of the queue then."""
        if self.active or self._device.is_capturing():
            return False
        if self._step.draft_step is None:
            self._callbacks.withdraw(self._step)
        return True

    def _launch_build(self, d2t: torch.Tensor | None) -> None:
        step, num_rows = self._step, self.requests.num_bitmask_tokens
        words = self._draft_words(d2t) if self.requests.is_draft else None
        if step.draft_step is None:
            self._launch(partial(self._callbacks.build_target, num_rows, words), is_target=True)
        else:
            self._launch(partial(self._callbacks.build_draft, step.draft_step, num_rows, words))

    def _draft_words(self, d2t: torch.Tensor | None) -> npt.NDArray[np.int32] | None:
        if self._device.is_capturing() and not self._draft_vocabulary.is_known(d2t):
            raise GuidedDecodingError(
                "this d2t has to be read before the capture; run execute_draft_batch with the same tensor once eagerly"
            )
        return self._draft_vocabulary.words(d2t)

    def _launch(self, function: Callable[[], None], *, is_target: bool = False) -> None:
        """Put a host function on the side stream, behind token_event."""
        device, event = self._device, self._buffers.token_event
        is_capturing = device.is_capturing()
        if is_capturing and not self._is_forked:
            device.record(event, device.main())
        self._is_forked = False
        device.wait(event, device.side)
        self._host_functions.launch_host(
            function,
            device.side,
            on_error=self._on_error,
            handle=self._handle if is_capturing else None,
            orphan=self._callbacks.weak_orphan(is_target) if is_capturing else None,
            reads=self._host_reads,
            writes=self._host_writes,
        )

    def _join(self) -> None:
        """Have the main stream wait for the side stream."""
        device, event = self._device, self._buffers.bitmask_event
        device.record(event, device.side)
        device.wait(event, device.main())

    def _run(self, function: Callable[[], None]) -> Failures:
        """Launch a host function that copies nothing; return what failed, eagerly."""
        try:
            self._launch(function)
            self._join()
        finally:
            self.drain()
        return [] if self._device.is_capturing() else self._take()

    def _returned(self) -> Failures:
        """Return what failed in the step at hand, each time it is asked for."""
        if self._device.is_capturing():
            return []
        self._failures = [*(self._failures or ()), *self._take()]
        return list(self._failures)

    def _take(self) -> Failures:
        if not self._callbacks.has_failures:
            return []
        return self.take_failures({request.request_id for request in self.requests.requests})

    def _next_rows(self) -> RowWriter:
        """Return the one writer. The order of the side stream keeps it from the copy before, no wait could here."""
        return self._writers[0]


# decoders whose host functions must be over before the interpreter goes
_open: "weakref.WeakSet[CapturableGuidedDecoder]" = weakref.WeakSet()


def _close_all() -> None:
    for decoder in list(_open):
        decoder.close()


atexit.register(_close_all)
