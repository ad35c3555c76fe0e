"""Tensor parallelism on a grid of X x Y ranks: sequence and hidden size are both sharded.

    rank r = y X + x of a tensor-parallel group of p = X Y ranks     (x: neighbours, y: strided)

    hidden states    [s/X, b, h/Y]     rows over x, columns over y
    qkv, fc1         gather rows over x, multiply with W [out/X, in/Y], reduce-scatter over y
    attention, GELU  [s/Y, b, n/X]     heads over x, tokens over y (and over context-parallel ranks)
    proj, fc2        gather rows over y, multiply with W [out/Y, in/X], reduce-scatter over x
    norm             statistics of a row are reduced over y

A collective involves X or Y ranks instead of p. A layer with many columns of qkv and fc1 sends
fewer bytes than one sharded in one dimension where X is large (:mod:`.cost`): 33 % fewer for
Llama-3-405B on 8 x 2. Activations are 1/p everywhere, as with sequence parallelism.

The algorithm was published by the authors of the original library as high-dimensional tensor
parallelism; relatives with broadcasts instead of gathers are Optimus (SUMMA) and Tesseract.
"""
