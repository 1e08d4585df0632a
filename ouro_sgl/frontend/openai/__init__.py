"""The routes of OpenAI's API, on top of the native ones.

A request becomes a :class:`~ouro_sgl.frontend.openai.job.Job`: the native request that it asks for, and
the shape of its answer. Names, defaults and extra fields are those of SGLang's OpenAI routes.
"""
