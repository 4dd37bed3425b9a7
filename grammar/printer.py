"""Tree to canonical text: one style, whatever the tree was written like.

Two spaces of indent, one statement a line, `=` and `on` of neighbouring lines in one column, lines of at most 100
characters with calls broken by arguments. Numbers stay as written. A new node class is one method with the class's
name; a class without a method is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.grammar import nodes
from rlflow.grammar.columns import Item, paddings
from rlflow.grammar.comments import Glue, Token
from rlflow.grammar.fragments import brackets, number_text, separated
from rlflow.grammar.layout import Blank, Doc, Group, IfBroken, Line, Nest, render

_CONDITIONAL, _NOT, _COMPARE = 0, 3, 4
_PRECEDENCE = {"or": 1, "and": 2, "+": 5, "-": 5, "*": 6, "/": 6}
_NEGATE, _QUANTITY, _POSTFIX = 7, 8, 9

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}

_BLOCKS = (nodes.Flow, nodes.Schedule, nodes.Cluster)
"""Items of a file that have an empty line around them."""


def print_tree(tree: nodes.Program | nodes.Expr) -> str:
    """The canonical text of a tree, without comments. TypeError for a node class the printer does not know."""
    text = render(Printer().doc(tree))
    return text if isinstance(tree, nodes.Program) else text.removesuffix("\n")


def print_source(program: nodes.Program) -> str:
    """The canonical text of a parsed file with its comments and single blank lines."""
    return render(Printer().doc(program), program.file.text)


class Printer:
    """Documents of nodes, one method for each node class."""

    def __init__(self) -> None:
        self._pads: dict[int, tuple[str, ...]] = {}

    def doc(self, node: object) -> Doc:
        method = getattr(self, type(node).__name__, None)
        if method is None:
            raise TypeError(f"the printer has no method for {type(node).__name__}")
        made: Doc = method(node)
        return made

    # --- parts -------------------------------------------------------------------------------------------------------

    def _pad(self, node: object, column: int = 0) -> str:
        pads = self._pads.get(id(node))
        return pads[column] if pads else ""

    def _lines(self, items: Sequence[Item]) -> list[Doc]:
        self._pads |= paddings(items)
        lines: list[Doc] = []
        for i, item in enumerate(items):
            if i:
                lines.append(Line(blank=Blank.KEEP, hard=True))
            lines.append(self.doc(item))
        return lines

    def _block(self, items: Sequence[Item]) -> Doc:
        if not items:
            return Group(["{", Line("", Blank.KEEP_LATER), "}"])
        first = Line(blank=Blank.KEEP_LATER, hard=True)
        return ["{", Nest([first, *self._lines(items)]), Line(blank=Blank.KEEP, hard=True), "}"]

    def _settings(self, settings: Sequence[nodes.Setting]) -> Doc:
        if not settings:
            return []
        self._pads |= paddings(settings, blanks=False)
        inside: list[Doc] = [Line(), *separated(self.doc(s) for s in settings), IfBroken(",")]
        return [" ", Group(["{", Nest(inside), Line(), "}"])]

    def _optional(self, word: str, node: object | None) -> Doc:
        return [] if node is None else [" ", word, " ", self.doc(node)]

    def _operand(self, node: nodes.Expr, least: int) -> Doc:
        """An operand, in parentheses when it binds less than `least`."""
        doc = self.doc(node)
        return doc if _precedence(node) >= least else ["(", doc, ")"]

    # --- file --------------------------------------------------------------------------------------------------------

    def Program(self, node: nodes.Program) -> Doc:
        self._pads |= paddings(node.items)
        lines: list[Doc] = []
        for i, item in enumerate(node.items):
            if i:
                apart = isinstance(item, _BLOCKS) or isinstance(node.items[i - 1], _BLOCKS)
                lines.append(Line(blank=Blank.FORCE if apart else Blank.KEEP, hard=True))
            lines.append(self.doc(item))
        return [*lines, Line(blank=Blank.KEEP, hard=True)] if lines else []

    def Import(self, node: nodes.Import) -> Doc:
        return ["import", " ", self.doc(node.path)]

    def Ident(self, node: nodes.Ident) -> Doc:
        return node.text

    # --- flow --------------------------------------------------------------------------------------------------------

    def Flow(self, node: nodes.Flow) -> Doc:
        params = brackets("(", [self.doc(p) for p in node.params], ")") if node.params else []
        return ["flow", " ", self.doc(node.name), params, " ", self._block(node.items)]

    def Param(self, node: nodes.Param) -> Doc:
        default: Doc = [] if node.default is None else [" ", "=", " ", self.doc(node.default)]
        return [self.doc(node.name), default]

    def Declaration(self, node: nodes.Declaration) -> Doc:
        kind: Doc = [node.kind, self._pad(node), " "]
        return [kind, self.doc(node.name), self._pad(node, 1), " ", "=", " ", self.doc(node.value)]

    def Assign(self, node: nodes.Assign) -> Doc:
        return [self.doc(node.name), self._pad(node), " ", "=", " ", self.doc(node.value)]

    def CallStatement(self, node: nodes.CallStatement) -> Doc:
        return self._operand(node.value, _POSTFIX)

    def Step(self, node: nodes.Step) -> Doc:
        return ["step", " ", self._block(node.body)]

    def If(self, node: nodes.If) -> Doc:
        head: Doc = ["if", " ", self._operand(node.condition, 1), " ", self._block(node.then)]
        if node.otherwise is None:
            return head
        if isinstance(node.otherwise, nodes.If):
            return [head, " ", Token("else", Glue.LEFT), " ", self.doc(node.otherwise)]
        return [head, " ", Token("else", Glue.LEFT), " ", self._block(node.otherwise)]

    def Evaluate(self, node: nodes.Evaluate) -> Doc:
        every = self._optional("every", node.every)
        return ["evaluate", " ", self.doc(node.name), every, " ", self._block(node.body)]

    def Allow(self, node: nodes.Allow) -> Doc:
        bound: Doc = [" ", "staleness", " ", "<=", " ", self.doc(node.bound)]
        return ["allow", " ", self.doc(node.model), bound, self._optional("with", node.correction)]

    def Stop(self, node: nodes.Stop) -> Doc:
        return ["stop", self._optional("after", node.after)]

    def Save(self, node: nodes.Save) -> Doc:
        return ["save", self._optional("every", node.every)]

    def Seed(self, node: nodes.Seed) -> Doc:
        return ["seed", " ", self.doc(node.value)]

    # --- schedule and cluster ----------------------------------------------------------------------------------------

    def Schedule(self, node: nodes.Schedule) -> Doc:
        head: Doc = ["schedule", " ", self.doc(node.flow), self._optional("on", node.cluster), " "]
        if len(node.items) == 1 and isinstance(node.items[0], nodes.Auto):
            return [head, Group(["{", Nest([Line(), self.doc(node.items[0])]), Line(), "}"])]
        return [head, self._block(node.items)]

    def Pool(self, node: nodes.Pool) -> Doc:
        head: Doc = ["pool", " ", self.doc(node.name), self._pad(node)]
        return [head, " ", "=", " ", self.doc(node.size), self._settings(node.settings)]

    def Place(self, node: nodes.Place) -> Doc:
        stages = Group(Nest(separated(self.doc(s) for s in node.stages)))
        pools = Group(Nest(separated(self.doc(pool) for pool in node.pools)))
        head: Doc = ["place", " ", stages, self._pad(node), " ", "on", " ", pools]
        if not node.settings:
            return head
        settings = Group(Nest(separated(self.doc(s) for s in node.settings)))
        return [head, Group(Nest([Line(), "with", " ", settings]))]

    def StageRef(self, node: nodes.StageRef) -> Doc:
        return [self.doc(node.owner), [] if node.stage is None else [".", self.doc(node.stage)]]

    def Staleness(self, node: nodes.Staleness) -> Doc:
        admit: Doc = [] if node.admit is None else [",", self._optional("admit", node.admit)]
        settings: Doc = [[",", Line(), self.doc(setting)] for setting in node.settings]
        head: Doc = ["staleness", " ", self.doc(node.model), " ", "=", " ", self.doc(node.bound), admit]
        return Group(Nest([head, settings])) if node.settings else head

    def Trigger(self, node: nodes.Trigger) -> Doc:
        carry: Doc = [] if node.carry is None else [",", self._optional("carry", node.carry)]
        return ["trigger", " ", self.doc(node.value), self._optional("at", node.share), carry]

    def Auto(self, node: nodes.Auto) -> Doc:
        return "auto"

    def Cluster(self, node: nodes.Cluster) -> Doc:
        return ["cluster", " ", self.doc(node.name), " ", self._block(node.entries)]

    def Entry(self, node: nodes.Entry) -> Doc:
        value = self.doc(node.value)
        return [self.doc(node.name), self._pad(node), " ", "=", " ", value, self._settings(node.settings)]

    def Setting(self, node: nodes.Setting) -> Doc:
        pad = self._pad(node)
        return [self.doc(node.name), IfBroken(pad) if pad else [], " ", "=", " ", self.doc(node.value)]

    # --- expressions -------------------------------------------------------------------------------------------------

    def Number(self, node: nodes.Number) -> Doc:
        return number_text(node)

    def Quantity(self, node: nodes.Quantity) -> Doc:
        return f"{number_text(node)}{'' if node.unit == '%' else ' '}{node.unit}"

    def String(self, node: nodes.String) -> Doc:
        return '"' + "".join(_ESCAPES.get(char, char) for char in node.value) + '"'

    def Constant(self, node: nodes.Constant) -> Doc:
        return str(node.value).lower()

    def Name(self, node: nodes.Name) -> Doc:
        return node.id

    def ListOf(self, node: nodes.ListOf) -> Doc:
        return brackets("[", [self.doc(item) for item in node.items], "]")

    def Attribute(self, node: nodes.Attribute) -> Doc:
        return [self._operand(node.base, _POSTFIX), ".", self.doc(node.name)]

    def Call(self, node: nodes.Call) -> Doc:
        function = self._operand(node.function, _POSTFIX)
        return [function, brackets("(", [self.doc(a) for a in node.arguments], ")")]

    def Argument(self, node: nodes.Argument) -> Doc:
        name: Doc = [] if node.name is None else [self.doc(node.name), " ", "=", " "]
        return [name, self.doc(node.value)]

    def Binary(self, node: nodes.Binary) -> Doc:
        return self._chain(node)

    def Logic(self, node: nodes.Logic) -> Doc:
        return self._chain(node)

    def _chain(self, node: nodes.Binary | nodes.Logic) -> Doc:
        """A chain such as `a + b - c` breaks before all of its operators or none."""
        level = _PRECEDENCE[node.operator]
        links: list[Doc] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Binary | nodes.Logic) and _PRECEDENCE[first.operator] == level:
            right = self._operand(first.right, level + 1)
            links.append([Line(), Token(first.operator, Glue.RIGHT), " ", right])
            first = first.left
        return Group([self._operand(first, level), Nest(links[::-1])])

    def Compare(self, node: nodes.Compare) -> Doc:
        left, right = (self._operand(side, _COMPARE + 1) for side in (node.left, node.right))
        return Group([left, Nest([Line(), Token(node.operator, Glue.RIGHT), " ", right])])

    def Not(self, node: nodes.Not) -> Doc:
        return [Token("not", Glue.RIGHT), " ", self._operand(node.operand, _NOT)]

    def Conditional(self, node: nodes.Conditional) -> Doc:
        """The `if` stays on the line of what is before it: at the start of a line it would be a statement."""
        head: Doc = [self._operand(node.then, 1), " ", Token("if", Glue.LEFT), " ", self._operand(node.condition, 1)]
        return Group([head, Nest([Line(), "else", " ", self.doc(node.otherwise)])])

    def Negate(self, node: nodes.Negate) -> Doc:
        return [Token("-", Glue.RIGHT), self._operand(node.operand, _NEGATE)]


def _precedence(node: nodes.Expr) -> int:
    if isinstance(node, nodes.Binary | nodes.Logic):
        return _PRECEDENCE[node.operator]
    for kind, level in ((nodes.Conditional, _CONDITIONAL), (nodes.Not, _NOT), (nodes.Compare, _COMPARE)):
        if isinstance(node, kind):
            return level
    if isinstance(node, nodes.Negate):
        return _NEGATE
    return _QUANTITY if isinstance(node, nodes.Quantity) else _POSTFIX
