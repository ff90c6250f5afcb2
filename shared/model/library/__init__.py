"""Models whose layers are those of the library transformers, while attention reads and writes our pages.

    text_part  the text part of a network that also sees images
    kinds      which kinds of models can't be served, by their config.json
    loading    folder -> network of the library -> survey -> LibraryModel -> check
    mapped_tensors  a folder's tensors, as they lie in its mapped files
    survey     one tiny forward that notes what each layer asks of attention
    attend     the function that the library's layers call, and what they keep in pages
    on_device  what of a network would wait for the host, changed
    long_factors  rotary factors of longrope, by row
    model      the Model that the engine runs
    captures   the hidden states that draft heads read
    mtp, mtp_loading  the model's own MTP layers as draft heads, and their check
    outlook    what a folder would take of memory, by its headers
    check      compares its logits with the library's own; a model that differs is refused

With --tp each rank has a part of the network:

    plan            what of each tensor, by the library's own plan
    parts           what ranks do before and after a module that is divided
    attend.rank_attention  a rank's own heads of the pages

Only `loading` and what it imports load transformers.
"""
