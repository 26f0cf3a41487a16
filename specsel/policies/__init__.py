"""Choice rules and their catalogue."""

from specsel.policies.catalogue import CATALOGUE, PLANS, Row, allowed, context_of, describe, policy_by_name

__all__ = ["CATALOGUE", "PLANS", "Row", "allowed", "context_of", "describe", "policy_by_name"]
