"""Registered keys of samples: dtypes, length rules and meaning (docs/reference/dataflow.md 2).

For a sequence of ``L`` tokens, a key with the rule ``L`` has one entry per token. With the rule
``L-1`` ("shifted"), the entry at position ``t`` belongs to the prediction of token ``t+1``. With
the rule ``1`` there is one entry per sequence, and with ``free`` any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

ITEMSIZE = MappingProxyType(
    {"bool": 1, "u8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
)
"""Size of one element in bytes, by dtype tag. Other dtypes are not supported."""

TORCH_NAMES = MappingProxyType(
    {
        "bool": "bool",
        "u8": "uint8",
        "i16": "int16",
        "i32": "int32",
        "i64": "int64",
        "f16": "float16",
        "bf16": "bfloat16",
        "f32": "float32",
        "f64": "float64",
    }
)
"""Name of each dtype in the torch module, by dtype tag."""

_TAG_OF_TORCH = MappingProxyType({f"torch.{name}": tag for tag, name in TORCH_NAMES.items()})

RULES = ("L", "L-1", "1", "free")
"""Length rules of keys; see the module's docstring."""


def dtype_tag(dtype: object) -> str:
    """Return the tag of a torch dtype. Raises ValueError for a dtype that samples do not
    support."""
    tag = _TAG_OF_TORCH.get(str(dtype))
    if tag is None:
        raise ValueError(
            f"dtype {dtype} is not supported in a sample; supported: {', '.join(ITEMSIZE)}"
        )
    return tag


@dataclass(frozen=True)
class KeySpec:
    """Dtype, length rule and shape of a registered key."""

    name: str
    """Name of the key."""
    dtype: str
    """Dtype tag, see ``ITEMSIZE``."""
    rule: str
    """Length rule, one of ``RULES``."""
    trailing: tuple[int, ...] = ()
    """Shape of one entry; () for scalars."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"key {self.name!r}: unknown dtype tag {self.dtype!r}")
        if self.rule not in RULES:
            raise ValueError(
                f"key {self.name!r}: unknown length rule {self.rule!r}, one of {RULES}"
            )


STANDARD_KEYS: tuple[KeySpec, ...] = (
    KeySpec("packed_prompts", "i64", "free"),
    KeySpec("packed_input_ids", "i64", "L"),
    KeySpec("prompt_mask", "bool", "L"),
    KeySpec("loss_mask", "bool", "L"),
    KeySpec("packed_logprobs", "f32", "L-1"),
    KeySpec("unmasked_logprobs", "f32", "L-1"),
    KeySpec("packed_versions", "i32", "L-1"),
    KeySpec("version_start", "i64", "1"),
    KeySpec("version_end", "i64", "1"),
    KeySpec("seq_no_eos_mask", "bool", "1"),
    KeySpec("env_rewards", "f32", "1"),
    KeySpec("rewards", "f32", "1"),
    KeySpec("verifier_rewards", "f32", "1"),
    KeySpec("dense_rewards", "f32", "L-1"),
    KeySpec("packed_ref_logprobs", "f32", "L-1"),
    KeySpec("proximal_logprobs", "f32", "L-1"),
    KeySpec("teacher_logprobs", "f32", "L-1"),
    KeySpec("feedback_prompt_ids", "i64", "free"),
    KeySpec("feedback_logratios", "f32", "L-1"),
    KeySpec("values", "f32", "L-1"),
    KeySpec("advantages", "f32", "L-1"),
    KeySpec("returns", "f32", "L-1"),
    KeySpec("kl_rewards", "f32", "L-1"),
    KeySpec("rl_weights", "f32", "L-1"),
    KeySpec("kl_weights", "f32", "L-1"),
    KeySpec("ce_weights", "f32", "L-1"),
    KeySpec("outcome", "u8", "1"),
    KeySpec("rollout_index", "i32", "1"),
    KeySpec("turn_ids", "i32", "L"),
    KeySpec("turn_rewards", "f32", "free"),
    KeySpec("turn_states", "i64", "free"),
)
"""All registered keys (docs/reference/dataflow.md 2)."""

UNMASKED_LOGPROBS = "unmasked_logprobs"
"""Key with the log-probabilities of the sampled tokens under the policy itself, if some of them
were sampled under a token mask. ``packed_logprobs`` are then those under the mask, with which the
tokens were sampled; without this key no token has a mask and both are equal."""

VERIFIER_REWARDS = "verifier_rewards"
"""Key that ``rew_inf`` produces if a reward model contributes to ``rewards``."""
ROLLOUT_KEY = "rollout_index"
"""Key with the number of the rollout to which each sequence of a sample belongs."""

TURN_IDS = "turn_ids"
"""Key with the number of the turn that sampled each token, from 0; -1 for tokens that the policy
did not sample."""
TURN_KEYS = (TURN_IDS, "turn_rewards", "turn_states")
"""Keys that rollouts produce if a call of the graph reads them."""

FEEDBACK_PROMPT = "feedback_prompt_ids"
"""Key with a sequence's prompt plus feedback, which rollouts produce if a call of the graph reads
it."""
FEEDBACK_RATIOS = "feedback_logratios"
"""Key with the log-probabilities of a sequence's tokens with feedback in the prompt, minus those
without."""
NONE, ERRORS, SOLVED, ANY = FEEDBACKS = ("none", "errors", "solved", "any")
"""Kinds of feedback that a policy can get on its attempts (``ppo.feedback``)."""


def key_spec(name: str) -> KeySpec:
    """Return the specification of a registered key. Raises KeyError for other names."""
    for spec in STANDARD_KEYS:
        if spec.name == name:
            return spec
    raise KeyError(f"key {name!r} is not registered: give its dtype and lengths explicitly")
