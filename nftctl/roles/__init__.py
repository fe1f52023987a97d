"""The five roles that live in every rank: data, rollout, reward, replay and policy."""
