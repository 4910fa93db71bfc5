"""Keep a training job going through every fault.

```
launcher (`dougong run`)      starts the controller, shows what happens, starts it again if it dies
└── controller                decides, writes the events; speaks with the agents by a per-run token
    └── agent, one per node   owns the node's workers, their memory checkpoints, their logs
        ├── courier           copies memory checkpoints to other nodes and keeps theirs
        └── zygote            has imported torch; forks a worker in milliseconds
            └── worker        one rank: the user's script
```
"""
