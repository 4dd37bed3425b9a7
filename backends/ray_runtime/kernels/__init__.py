"""The operations that a model's time goes into, each with a torch reference and a torch_npu implementation.

`table.py` lists them; `kernel.py` says how one is chosen; `serve.py` puts them under transformers' models. torch_npu is
imported by the implementations that call it, when they are called: nothing here needs it on other devices.
"""
