"""Training what drafts for a model on text that the model writes itself: Medusa heads and draft models.

`corpus` has the target write texts, `data` computes its hidden states on them, `loop` trains; `heads` and
`draft` say what is trained and how it is judged, and `command` is what their command lines share. Every
stage leaves files in a work folder, so that an interrupted command goes on from there.
"""
