"""The agent of one node: counts, reports, and moves experts when the leader orders it. `agent.loop` tells the story."""
