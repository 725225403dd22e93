"""Gymnasium environments that speak text; importing this package registers them."""

import gymnasium

gymnasium.register(id="freshper/CliffWalking-v0", entry_point="freshper_lightning.envs.cliff_walking:CliffWalking")
gymnasium.register(id="freshper/FrozenLake-v0", entry_point="freshper_lightning.envs.frozen_lake:FrozenLake")
gymnasium.register(id="freshper/MathQuestion-v0", entry_point="freshper_lightning.envs.math:MathQuestion")
gymnasium.register(id="freshper/Sokoban-v0", entry_point="freshper_lightning.envs.sokoban:Sokoban")
