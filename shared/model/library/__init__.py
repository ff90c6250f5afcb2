"""Models whose layers are those of the library transformers, while attention reads and writes our pages.

    choice     whether the library runs a model; imports nothing of it
    loading    folder -> network of the library -> survey -> LibraryModel -> check
    survey     one tiny forward that notes what each layer asks of attention
    attention  the function that the library's layers call
    model      the Model that the engine runs
    captures   the hidden states that draft heads read
    check      compares its logits with the library's own; a model that differs is refused

Only `loading` and what it imports load transformers.
"""
