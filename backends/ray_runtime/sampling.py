"""From logits to tokens, and where a response ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def response_lengths(tokens: torch.Tensor, eos_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's response ends: the first end token is its last token, without one it fills the row.

    Args: `tokens` int64 [rows, width]; what follows an end token is ignored. Returns lengths int64 [rows] and
    truncated bool [rows]: no end token was sampled. Nothing is ever appended to a truncated response.
    """
    width = tokens.shape[1]
    ends = torch.isin(tokens, torch.tensor(eos_ids, device=tokens.device))
    found = ends.any(1)
    lengths = torch.where(found, ends.int().argmax(1) + 1, torch.full_like(found, width, dtype=torch.int64))
    return lengths, ~found


@dataclass(frozen=True, slots=True)
class Sampler:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the row's uniform draw.

    top-k keeps the k likeliest tokens; then top-p (Holtzman et al. 2020, arXiv 1904.09751) the smallest set of the
    likeliest tokens whose renormalised probability reaches p. The CDF is summed in float64, in the order of token ids.
    `never` int64 [ids], where the logits are: ids that are never taken, as if their logits were -inf.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    never: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, draws: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [rows] and their log-probabilities float32 [rows] before `never`, top-k and top-p.

        Args: `logits` [rows, vocabulary]; `draws` float64 [rows] in [0, 1 - 2**-52], None when greedy.
        """
        logits = logits.float()
        if draws is None:
            logp = torch.log_softmax(logits, -1)
            chosen = self._possible(logits).argmax(-1, keepdim=True)
            return chosen[:, 0], logp.gather(1, chosen)[:, 0]
        logp = torch.log_softmax(logits if self.temperature == 1.0 else logits / self.temperature, -1)
        weights = logp.exp() if self.never is None else torch.softmax(self._possible(logp), -1)
        if self.top_k or self.top_p < 1.0:
            weights = self._truncate(weights)
        cdf = torch.cumsum(weights, -1, dtype=torch.float64)
        chosen = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)
        return chosen[:, 0], logp.gather(1, chosen)[:, 0]

    def ended(
        self, logits: torch.Tensor, draws: torch.Tensor | None, ending: torch.Tensor, token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As a call, but the rows that `ending` bool [rows] marks get `token`, with the log-probability it has."""
        tokens, logp = self(logits, draws)
        cold = draws is None or self.temperature == 1.0
        own = torch.log_softmax(logits.float() if cold else logits.float() / self.temperature, -1)[:, token]
        return tokens.masked_fill(ending, token), torch.where(ending, own, logp)

    def _possible(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.never is None else scores.index_fill(-1, self.never, float("-inf"))

    def _truncate(self, weights: torch.Tensor) -> torch.Tensor:
        ordered, tokens = torch.sort(weights, dim=-1, descending=True, stable=True)
        if self.top_k:
            ordered[:, self.top_k :] = 0.0
        if self.top_p < 1.0:
            ordered /= ordered.sum(-1, keepdim=True)
            # A token stays while the ones before it have not yet reached p, so the likeliest always stays.
            ordered = torch.where(ordered.cumsum(-1) - ordered < self.top_p, ordered, 0.0)
        return torch.zeros_like(weights).scatter_(1, tokens, ordered)
