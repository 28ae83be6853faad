"""Any `nn.Module` by a plan: `zoo.checkpoint(model)`, `zoo.uncheckpoint`, `zoo.chain_of`.

1. *Watch*. The model's forward runs once on fake tensors. Every call of a torch function and of a
   module that is a leaf is written on a *tape*, with where its tensors came from (`watch`, `tape`).
   Not `torch.fx`: its symbols fail at the first branch over a shape, and where they do not, nothing
   proves that the traced forward does what the written one does. Here the Python code runs for
   real, and the tape is what it did.
2. *Cut*. The tape becomes the steps of a chain (`steps`), its calls grouped by the blocks that the
   model repeats (`blocks`). The state is whatever a later step reads: skips, masks and several
   inputs need nothing special. From here on a foreign model is a chain like the zoo's own: the same
   profile, planner and engine.
3. *Guard*. What the inlined code looked at while it was watched - attributes, children, settings in
   objects, globals, the kinds of the inputs, autocast - is noted and compared at every forward; the
   model is watched again where something differs (`guard`, `following`).
4. *In force* is one instance attribute, `forward` (`forward`). Nothing is wrapped or renamed.

    conv1 | bn1 relu | maxpool | conv | bn relu | conv | bn += relu | ... | avgpool flatten | fc

The tape is proven before it is used: its steps and the model as it is written must send the same
operations on the same tensors to the kernels (`rehearsal`). What a tape cannot repeat makes its
module a leaf, called as a whole; `watch` lists it. Where that is the model itself (it reads a
number out of a tensor, or hands a cache on), it runs as it is written and each of its blocks is a
segment of `zoo.recompute`; an option that needs more is refused with the reason. So is a model
whose own checkpointing is on (`switches`).

Not seen, so that a tape may be wrong: a forward that depends on the clock, on files, on the
environment, or on an object that hides its state from Python's `vars`. Not called, so that nothing
is saved: methods other than `forward`, such as timm's `forward_features`.
"""
