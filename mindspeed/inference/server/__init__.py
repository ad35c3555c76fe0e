"""A server with OpenAI's API in front of a model on any number of ranks.

    HTTP, event loop          worker thread of rank 0             other ranks
    app  --- queue --->  engine: one request at a time  ======>  follow()
         <-- pieces ---                                 broadcasts of control and model

``guard`` lets nobody in who should not be, ``protocol`` knows what requests and answers look like,
``app`` joins them, ``engine`` is the only one that touches the model.
"""
