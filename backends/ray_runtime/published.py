"""Whether what is published is what was trained."""

from __future__ import annotations

from rlflow.diagnostics.diagnostic import RunFailure


class PublishCheck:
    """Watches the digests of the weights that a sampling copy is given.

    A copy that gets the same weights again and again although the training moves them looks like staleness: the loss
    goes on, the ratio drifts, and nothing fails. Two publishes in a row without a change are refused.
    """

    def __init__(self, model: str, digest: str) -> None:
        """`digest` is that of the weights the copy starts with."""
        self._model = model
        self.restart(digest)

    def restart(self, digest: str) -> None:
        """Begin anew with the weights of a checkpoint."""
        self._digest = digest
        self._unchanged = 0

    def publish(self, digest: str, moved: bool) -> None:
        """Note a publish; `moved`: an update with a gradient and a learning rate came before it. RLF5018."""
        changed, self._digest = digest != self._digest, digest
        self._unchanged = 0 if changed or not moved else self._unchanged + 1
        if self._unchanged >= 2:
            raise RunFailure(
                "RLF5018",
                f"`{self._model}` was trained twice, and its samples still come from the weights before",
                notes=(f"digest of the published weights: {digest[:16]}... at three publishes",),
                help=(
                    "raise the learning rate if it is below what float32 resolves beside the weights",
                    "otherwise this is a bug of rlflow: the sampling copy does not get what the trainer trains",
                ),
            )
