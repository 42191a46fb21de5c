"""debug-serve: an OpenAI-compatible server over one signed core, with what an engineer needs to see beside the text.

    serve(path, trust, ServeSettings(port=8000), on_ready=print)
"""

from runtime.serve.settings import ServeSettings

__all__ = ["ServeSettings"]
