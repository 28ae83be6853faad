"""The catalog for `torch.hub`: a function for each name of `zoo.list_models()`.

    torch.hub.load("path/to/this/folder", "resnet50", source="local", checkpoint=True)

Each takes what `zoo.create` takes: `checkpoint=`, `memory_budget=`, `pretrained=`, and the model's
own arguments.
"""

import zoo

dependencies = ["torch", "einops"]

globals().update((name, getattr(zoo, name)) for name in zoo.list_models())
