"""Off-policy evaluation: the value of a policy, estimated from a data set that other policies collected."""

from typing import Any

from polyak.core.suggestions import missing_from_module
from polyak.off_policy_evaluation.estimate import Estimate
from polyak.off_policy_evaluation.fitted_q import FQE, FittedQ
from polyak.off_policy_evaluation.policy_steps import action_log_probs
from polyak.off_policy_evaluation.policy_value import evaluate_offline

__all__ = ["FQE", "Estimate", "FittedQ", "action_log_probs", "evaluate_offline"]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_from_module(__name__, name, __all__))
