"""Changes of one line that break a rule of a push, each with the tests that must notice it. See scripts/mutation.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``text`` is in ``file`` once; ``instead`` is what replaces it. ``tests`` are names for pytest."""

    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


MUTANTS: list[Mutant] = []


def _of(file: str, tests: tuple[str, ...], *changes: tuple[str, str]) -> None:
    for text, instead in changes:
        MUTANTS.append(Mutant(f"layerpush/{file}.py", text, instead, tuple(f"tests/{test}" for test in tests)))


_of(
    "prefill/samples",
    ("unit/test_verify_bounds.py",),
    ("self._drop_after(blocks.kept_tokens)", "pass"),
    ("start for start, (last, _) in taken.items() if last <= end", "taken"),
    ("self._count -= most", "pass"),
    ("self._bytes -= most * size", "pass"),
    ("if registration.verifies != CHECKSUM or chance >= self._share:", "if chance >= self._share:"),
)
_of(
    "prefill/push_session",
    ("unit/test_writer_prefix.py", "unit/test_push_session.py", "unit/test_writer_order.py"),
    ("and not self._was_provisional:", "and self._was_provisional:"),
    ("if has_room and (may_split", "if (may_split"),
    ("if self.in_flight or not self._ready_blocks.is_complete", "if not self._ready_blocks.is_complete"),
    ("if self._provisional and not self._finished:", "if self._provisional:"),
    ("if self._provisional and not self._finished:", "if False:"),
    ("if not self.registration.number or self._was_provisional:", "if not self.registration.number:"),
    ("if self.landed_bytes >= size and self._coverage.has_landed(counts):", "if self.landed_bytes >= size:"),
    ("if tokens > blocks.kept_tokens and any(counts):", "if any(counts):"),
    ("if tokens > blocks.kept_tokens and any(counts):", "if tokens > blocks.kept_tokens:"),
    ("self.epoch, self._unreported = epoch, 0", "self.epoch = epoch"),
    ("self.landed_bytes = self.posted_bytes = self._ready_blocks.kept_bytes", "pass"),
    ('if self.in_flight and self.outcome == "pending":', "if self.in_flight:"),
    ("if event.epoch == self.epoch and event.chunk", "if event.chunk"),
    ("self._void = event.void", "pass"),
    ("self._recomputes = True  # the same tokens: D has the right KV", "pass"),
    ("registration.sampling is not None and self.failure is None:", "registration.sampling is not None:"),
)
_of(
    "prefill/push",
    ("unit/test_writer_prefix.py",),
    ("self.handle(PrefixReported(action.chunk))", "pass"),
    (
        "_report_prefix(self, action: ReportPrefix) -> None:\n        if self._services.is_revoked(self):",
        "_report_prefix(self, action: ReportPrefix) -> None:\n        if False:",
    ),
    (", void=isinstance(error, CoverageError)", ""),
)
_of(
    "prefill/push",
    ("unit/test_both_sides.py::test_no_damaged_kv_is_kept",),
    ("action.tokens, self._sample)", "action.tokens)"),
)
_of(
    "prefill/step_events",
    ("unit/test_step_events.py", "unit/test_writer_order.py", "unit/test_writer_prefix.py"),
    ("self._void.get(request_id, 0) > step", "self._void.get(request_id, 0) >= step"),
    ("self._void.get(request_id, 0) > step", "self._void.get(request_id, 0) > step + 1"),
    (
        "            if self._revoked:\n                return None",
        "            if False:\n                return None",
    ),
    ("done.computed <= swept", "done.computed < swept"),
    ("return len(computed) == self._microbatches", "return True"),
    ("if number in computed:", "if False:"),
    ("self._last_step.pop(request_id, None)", "pass"),
)
_of(
    "prefill/claim_session",
    ("unit/test_claims.py", "unit/test_claims_explored.py"),
    ("if report.drained:", "if True:"),
    (" and not report.void", ""),
    ("if registration.attempt < known:", "if registration.attempt <= known:"),
    ("if registration.attempt <= last.attempt:", "if registration.attempt < last.attempt:"),
    ("senders) < MAX_TP_SIZE", "senders) >= 0"),
    ("if not report.drained or report.reason != Aborted.reason:", "if report.reason != Aborted.reason:"),
)
_of(
    "decode/load_session",
    ("unit/test_load_session.py",),
    ("self._needed = max(self._needed, event.needed)", "self._needed = event.needed"),
    ("        if self.is_void:\n", "        if False:\n"),
    (" and not self.is_void", ""),
    ("if event.void and event.agent in self.open_agents:", "if event.void:"),
    ("max(event.tokens, self._prefixes.get(event.agent, 0))", "event.tokens"),
    (
        "max(self._retry_s, min(2 * self._retry_s, self._cancel_timeout_s))",
        "min(2 * self._retry_s, self._cancel_timeout_s)",
    ),
)
_of(
    "decode/load",
    ("unit/test_loads.py",),
    ("if self.session.state is State.PARKED or sender", "if sender"),
    ("if self.session.state is State.PARKED or", "if self.session.state is not State.WAITING or"),
    ("known.tokens <= message.tokens", "known.tokens >= message.tokens"),
    ("if message.number == self.registration.number != 0:", "if message.number == self.registration.number:"),
    ("message.drained, message.void)", "message.drained)"),
    ("self._prefixes[sender] = message", "pass"),
    ("if wrong or self.session.is_void", "if wrong"),
)
_of(
    "transport/acknowledged",
    ("unit/test_acknowledged.py",),
    ("self._unacknowledged.pop(posted.number, None)", "pass"),
    ("if posted is not None and posted.agent == agent:", "if posted is not None:"),
    ("if number in self._landed.get(agent, ()):", "if True:"),
    ("elif now >= posted.ask_at:", "elif True:"),
)
_of(
    "prefill/coverage",
    ("unit/test_coverage.py", "unit/test_push_session.py"),
    (" or np.count_nonzero(self._posted[layers, first:end]) < cells.size:", ":"),
    ("if np.count_nonzero(cells) or ", "if "),
    ("        if np.count_nonzero(cells):", "        if False:"),
    ("zip(kept, blocks, strict=True)", "zip([0] * len(blocks), blocks, strict=True)"),
    ("if any(wanted) and any(total", "if any(total"),
    ("if any(count > total for", "if any(count >= total for"),
)
_of(
    "prefill/ready_blocks",
    ("unit/test_ready_blocks.py", "unit/test_push_session.py", "unit/test_writer_prefix.py"),
    ("if source != NULL_BLOCK and target != NULL_BLOCK and", "if target != NULL_BLOCK and"),
    ("if source != NULL_BLOCK and target != NULL_BLOCK and", "if source != NULL_BLOCK and"),
    ("max(kept, self._bytes_up_to(len(self._chunk_ends)))", "self._bytes_up_to(len(self._chunk_ends))"),
    (
        "self._posted = [self._kept[group] for group in self._layer_groups]",
        "self._posted = [0] * len(self._layer_groups)",
    ),
    ("if layer in layers:", "if False:"),
    ("first, end = max(self._posted[layer], self._skipped[group]),", "first, end = self._posted[layer],"),
    ("max(self._postable_end(layer), self._posted[layer])", "self._postable_end(layer)"),
)
_of(
    "compat/pieces",
    ("connector/test_links.py",),
    ("if max(ours * pages, theirs * info.pages) > MAX_PIECES:", "if ours * pages > MAX_PIECES:"),
    ("if filled[part.row] != part.row_bytes != row.block_bytes and not info.places:", "if False:"),
    ("if rest or more:", "if rest:"),
    ("key = ratio, -info.kernel_tokens", "key = ratio, -1"),
)
_of(
    "compat/pieces",
    ("connector/ranks/test_ranks.py::test_every_byte_of_the_kv",),
    ("first = heads * plan.rank_to_attention_slot[route.remote_rank]", "first = 0"),
)
_of(
    "decode/outcomes",
    ("unit/test_loads.py",),
    ("LoadUnregistered(request_id, self._rank)", "LoadUnregistered(request_id, 0)"),
    ("LoadParked(request_id, self._rank)", "LoadParked(request_id, 0)"),
    ("LoadCleared(record.request_id, self._rank)", "LoadCleared(record.request_id, 0)"),
)
_of(
    "engine/scheduler/scheduler",
    ("connector/test_scheduler_storms.py", "connector/test_decode_scheduler.py"),
    (
        "min(request.num_computed_tokens, request.num_tokens - 1)",
        "min(request.num_computed_tokens, request.num_tokens)",
    ),
    ("min(tokens, request.num_prompt_tokens - 1)", "min(tokens, request.num_prompt_tokens)"),
)
_of(
    "engine/scheduler/places",
    ("unit/test_places.py", "connector/test_decode_scheduler.py"),
    ("awaited + need <= self._most", "need <= self._most"),
    ("        self._since = now if self._since is None else self._since\n", "        self._since = now\n"),
    ("return self._growth - free", "return 0"),
)
