"""An OpenAI-compatible HTTP server for a model on any number of ranks.

    HTTP, event loop          worker thread of rank 0             other ranks
    app  --- queue --->  engine: continuous batching     ======>  follow()
         <-- chunks --                                  broadcasts of batch updates and tokens

``limits`` authenticates, and limits requests and open connections, ``protocol`` knows the JSON of
requests and responses, ``app`` routes them to the ``engine``, the only module that runs the model,
and ``run`` is the server process.
"""
