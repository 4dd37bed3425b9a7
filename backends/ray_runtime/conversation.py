"""Conversations: the model and an environment take turns inside one response.

A turn of the model ends with an end token. Its text (without special tokens) goes to the environment; what the
environment answers is tokenised once, appended, and read by the model before its next turn. Ids that were sampled stay
as they are, the end token of each turn included, and are never made from text again.

    prompt | 12+7?<end> 19; 19<end>          response_ids
           |  1 1 1 1 1  0 0 0  1 1 1        mask: 1 = sampled by the model
           |  sampled    0.0    sampled      logprobs

A conversation is over when the environment returns None, when the model has had `turns` turns, or at `max_new` tokens
after the prompt, observations included. The environment does not see turn number `turns`, as nobody would read its
answer, nor a turn without an end token. `truncated` says that `max_new` cut the conversation: a turn has no end token,
or an observation came that left the model no token to answer it. Such an observation is not appended, so every response
ends with a token of the model.

All rows of a wave finish a turn before the environments are called, all at once; rows that are through leave the cache
meanwhile. The caches are then put side by side again and read the end token and the observation in one forward.

The column `text` is all of it decoded, observations included; in a chat the role names of the template are part of it.

How an observation is written:
  * a raw prompt: its text as it is, without special tokens;
  * a chat (the prompt went through the chat template): what the template puts between the end token of an assistant
    message and the start of the next one when a message with the observation, of role "user" or the environment's
    `role`, stands between them. Only this piece is rendered; earlier turns are never rendered again, so templates that
    drop thoughts from old turns do not change what the model has read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.data_sources import describe, shorten
from rlflow.backends.ray_runtime.decoder import Decoder, Parked
from rlflow.backends.ray_runtime.engine_gate import GO_ON
from rlflow.backends.ray_runtime.environment_worker import Environments, Observation, Turn, environment_failed
from rlflow.backends.ray_runtime.generation import Generation, left_padded
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.prompts import lost_character
from rlflow.backends.ray_runtime.replica import Replica
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate

_REPLY = "rlflow-reply"
"""Stands for the model's turn where the template is asked what follows it."""


class Conversations:
    """The conversations of one `generate`: fills its samples. In a replica the first rank asks the environments."""

    def __init__(
        self,
        decoder: Decoder,
        loaded: LoadedModel,
        op: Generate,
        environments: Environments | None,
        prompts: Batch,
        samples: Generation,
        replica: Replica,
    ) -> None:
        self._decoder = decoder
        self._loaded = loaded
        self._op = op
        self._environments = environments
        self._prompts = prompts
        self._samples = samples
        self._replica = replica
        self._tokens = samples.tokens
        count = len(samples.tokens)
        self.mask = torch.zeros(count, op.max_new, dtype=torch.int64)
        self.lengths = torch.zeros(count, dtype=torch.int64)
        self.turns = torch.zeros(count, dtype=torch.int64)
        self.truncated = torch.zeros(count, dtype=torch.bool)

    def run(self, rows: np.ndarray, most: int, compact_share: int) -> None:
        """Take the samples numbered `rows` to their ends, in waves of about `most`.

        `compact_share`: rows leave the cache when at least one in so many is through.
        """
        for wave in self._samples.waves(rows, most):
            self._run_wave(torch.from_numpy(wave), compact_share)

    def _run_wave(self, rows: torch.Tensor, compact_share: int) -> None:
        logits, draws = self._samples.prefill(rows)
        order = {row: index for index, row in enumerate(rows.tolist())}
        while True:
            before = self.lengths.clone()
            mine = None if draws is None else draws[[order[row] for row in rows.tolist()]]
            parked = self._take_turn(logits, rows, mine, compact_share)
            self.turns[rows] += 1
            observed = self._ask(torch.cat([part_rows for part_rows, _ in parked]), before) if parked else {}
            if not observed:
                break
            rows, logits = self._read_observations(parked, observed)
        if self._environments is not None:
            self._environments.forget()

    # --- the model's turn ------------------------------------------------------------------------------------------

    def _take_turn(
        self, logits: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor | None, compact_share: int
    ) -> list[tuple[torch.Tensor, Parked]]:
        """Sample until every turn is over. Returns the rows that the environment is asked for, with their caches."""
        device, max_new = logits.device, self._op.max_new
        eos = torch.tensor(self._loaded.eos_ids, device=device)
        begin = self.lengths[rows].to(device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)  # with an end token
        length = torch.zeros_like(begin)
        """tokens of a turn that is over, 0 while it goes on"""
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        parked: list[tuple[torch.Tensor, Parked]] = []
        start = count = 0
        while True:
            position = (begin + count).clamp(max=max_new - 1)  # a row that is through goes along until it is dropped
            draw = None if draws is None else draws.gather(1, position[:, None])[:, 0]
            chosen, logp, signal = self._samples.sample(logits, draw)
            if signal:
                self._store(rows, begin, length, pending, start)
                pending, start = [], count
                if self._samples.pause(signal):
                    logits = self._read_again(rows)
                chosen, logp, _ = self._samples.sample(logits, draw, GO_ON)
            pending.append((chosen, logp))
            count += 1
            running = length == 0
            ended |= running & torch.isin(chosen, eos)
            length = torch.where(running & (ended | (begin + count >= max_new)), count, length)
            through = length > 0
            finished = int(through.sum())
            last = finished == len(rows)
            if last or (finished and finished * compact_share >= len(rows)):
                self._store(rows, begin, length, pending, start)
                pending, start = [], count
                over = torch.nonzero(through)[:, 0]
                out = rows[over.cpu()]
                self.truncated[out] = ~ended[over].cpu()
                asked = over[ended[over] & (self.turns[out] + 1 < self._op.turns).to(device)]
                if len(asked):
                    parked.append((rows[asked.cpu()], self._decoder.park(asked)))
                if last:
                    return parked
                alive = torch.nonzero(~through)[:, 0]
                self._decoder.select(alive)
                rows, chosen, begin, ended, length = (
                    rows[alive.cpu()],
                    chosen[alive],
                    begin[alive],
                    ended[alive],
                    length[alive],
                )
                draws = None if draws is None else draws[alive]
            logits = self._decoder.step(chosen)

    def _store(
        self,
        rows: torch.Tensor,
        begin: torch.Tensor,
        length: torch.Tensor,
        pending: list[tuple[torch.Tensor, torch.Tensor]],
        start: int,
    ) -> None:
        """Write the columns sampled since the last time, but for what rows sampled after their turn's end."""
        if not pending:
            return
        counts = start + torch.arange(len(pending))
        end = torch.where(length > 0, length, start + len(pending)).cpu()
        real = counts < end[:, None]
        columns = (begin.cpu()[:, None] + counts)[real]
        lines = rows[:, None].expand_as(real)[real]
        self._samples.write(
            (lines, columns),
            torch.stack([chosen for chosen, _ in pending], 1).cpu()[real],
            torch.stack([logp for _, logp in pending], 1).cpu()[real],
        )
        self.mask[lines, columns] = 1
        self.lengths[rows] = begin.cpu() + end

    # --- the environment's turn ------------------------------------------------------------------------------------

    def _ask(self, rows: torch.Tensor, before: torch.Tensor) -> dict[int, list[int]]:
        """The observations' ids by sample; samples whose conversation is over are left out."""
        numbers = rows.sort().values.tolist()
        said = [self._tokens[row, before[row] : self.lengths[row]] for row in numbers]
        texts = decode_text(self._loaded.tokenizer, Packed.from_rows(said, torch.int64))
        uids, records = self._prompts.array("uid"), self._prompts.items("record")
        turns = [
            Turn(row, int(uids[row // n]), row % n, int(self.turns[row]), records[row // n], text)
            for n in (self._op.n,)
            for row, text in zip(numbers, texts, strict=True)
        ]
        observed: dict[int, list[int]] = {}

        def answers() -> list[list[int] | None]:
            assert self._environments is not None
            found = zip(turns, self._environments.step(turns), strict=True)
            return [None if answer is None else self._encode(answer, turn) for turn, answer in found]

        for turn, ids in zip(turns, self._replica.from_first(answers), strict=True):
            if ids is None:
                continue
            length = int(self.lengths[turn.key])
            if length + len(ids) >= self._op.max_new:
                self.truncated[turn.key] = True
                continue
            where = (torch.tensor(turn.key), slice(length, length + len(ids)))
            self._samples.write(where, torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids)))
            self.lengths[turn.key] += len(ids)
            observed[turn.key] = ids
        return observed

    def _encode(self, answer: Observation, turn: Turn) -> list[int]:
        loaded, prompt = self._loaded, turn.key // self._op.n
        text = self._prompts.items("prompt_text")[prompt]
        try:
            raw = turn.record.get("prompt", text) == text
            piece = answer.text if raw else template_piece(loaded.tokenizer, answer, loaded.eos_ids)
            ids = list(loaded.tokenizer(piece, add_special_tokens=False)["input_ids"])
            lost = lost_character(loaded.tokenizer, piece, ids)
            if lost is not None:
                raise ValueError(f"the tokenizer has no token for the character {lost!r}")
        except Exception as error:  # templates raise their own kinds, tokenizers a bare Exception
            what = f"returned the observation {shorten(answer.text)}, which the model cannot read,"
            assert self._environments is not None
            raise environment_failed(self._environments.name, what, turn, cause=describe(error)) from None
        return ids

    def _read_observations(
        self, parked: list[tuple[torch.Tensor, Parked]], observed: dict[int, list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the caches of the conversations that go on together and read what is new; rows and next logits."""
        device = parked[0][1].pads.device
        rows: list[int] = []
        caches: list[Parked] = []
        for part_rows, part in parked:
            kept = [index for index, row in enumerate(part_rows.tolist()) if row in observed]
            rows += part_rows[kept].tolist()
            caches.append(part.select(torch.tensor(kept, dtype=torch.int64, device=device)))
        ids, lengths = self._whole(rows)
        new = 1 + max(len(observed[row]) for row in rows)  # the turn's last token was never given to the decoder
        chosen = torch.tensor(rows, dtype=torch.int64)
        room = self._op.max_new - int(self.lengths[chosen].min())
        parked.clear()  # frees memory: only the selected copies are needed
        logits = self._decoder.resume(caches, ids.to(device), lengths.to(device), new, room)
        return chosen, logits

    def _read_again(self, rows: torch.Tensor) -> torch.Tensor:
        """Fill a cache that was dropped in the middle of a turn; the next tokens' logits."""
        if self._samples.stopped:
            raise RunFailure("RLF5006", "a multi-turn generate was aborted")
        ids, lengths = self._whole(rows.tolist())
        device = self._samples.device
        return self._decoder.prefill(
            ids.to(device), lengths.to(device), self._op.max_new - int(self.lengths[rows].min())
        )

    def _whole(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts and responses of some samples, int64 [rows, longest] padded on the left, and their lengths."""
        prompts = self._prompts.packed("prompt_ids")
        return left_padded(
            [
                torch.cat([prompts.row(row // self._op.n), self._tokens[row, : self.lengths[row]]]).numpy()
                for row in rows
            ],
            self._loaded.pad_id,
        )


def template_piece(tokenizer: Any, answer: Observation, eos_ids: tuple[int, ...]) -> str:
    """What the chat template writes from behind an assistant message's end token to the start of the next one, with
    `answer` as a message between. ValueError when the template does not end a message with an end token."""
    chat = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _REPLY},
        {"role": answer.role, "content": answer.text},
    ]
    text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    after = text.partition(_REPLY)[2]
    ends = [end for end in tokenizer.convert_ids_to_tokens(list(eos_ids)) if end and after.lstrip().startswith(end)]
    if not ends:
        raise ValueError(f"the chat template does not end an assistant message with an end token: {after[:40]!r}")
    return after.lstrip()[len(max(ends, key=len)) :]


def decode_text(tokenizer: Any, responses: Packed) -> list[str]:
    """The rows' text without special tokens."""
    values = responses.values.tolist()
    rows = [values[a:b] for a, b in pairwise(responses.offsets.tolist())]
    if getattr(tokenizer, "clean_up_tokenization_spaces", False) or not rows:
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True)) if rows else []
    # What batch_decode does row by row, in one call.
    return list(tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True))
