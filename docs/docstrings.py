"""For mkdocstrings: a list of arguments, where a docstring has lines "name: meaning", which Markdown would join."""

import re

import griffe

# Only behind the end of a sentence: elsewhere a word before a colon is prose.
ARGUMENT = re.compile(r"(?:\A|(?<=[.;:]\n))(?=[a-z_][\w.]*(?:, [a-z_][\w.]*)*: )")


class Arguments(griffe.Extension):
    """One item an argument; the lines that follow belong to it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        paragraphs = obj.docstring.value.split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            if ARGUMENT.search(paragraph):
                first, *others = ARGUMENT.split(paragraph)
                items = ["- " + other.rstrip("\n").replace("\n", "\n    ") for other in others]
                paragraphs[i] = "\n".join([first.rstrip("\n"), "", *items]).strip("\n")
        obj.docstring.value = "\n\n".join(paragraphs)
