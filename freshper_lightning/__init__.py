"""Freshness-aware prioritized experience replay for LLM and VLM reinforcement learning, on Lightning."""
