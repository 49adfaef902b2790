"""The algorithms, one file each, by the name that the command line gives them."""

from polyak.agents.ppo import PPO

AGENTS = {"ppo": PPO}
