"""Gymnasium environments that speak text; importing this package registers them."""

import gymnasium

gymnasium.register(id="freshper/Arithmetic-v0", entry_point="freshper_lightning.envs.arithmetic:Arithmetic")
gymnasium.register(id="freshper/CliffWalking-v0", entry_point="freshper_lightning.envs.cliff_walking:CliffWalking")
gymnasium.register(id="freshper/FrozenLake-v0", entry_point="freshper_lightning.envs.frozen_lake:FrozenLake")
gymnasium.register(id="freshper/GymText-v0", entry_point="freshper_lightning.envs.gym_text:GymText")
gymnasium.register(id="freshper/MathQuestion-v0", entry_point="freshper_lightning.envs.math:MathQuestion")
gymnasium.register(id="freshper/ReasoningGym-v0", entry_point="freshper_lightning.envs.reasoning:ReasoningGym")
gymnasium.register(id="freshper/SearchQuestion-v0", entry_point="freshper_lightning.envs.search:SearchQuestion")
gymnasium.register(id="freshper/Sokoban-v0", entry_point="freshper_lightning.envs.sokoban:Sokoban")
gymnasium.register(id="freshper/TextArena-v0", entry_point="freshper_lightning.envs.arena:TextArena")
