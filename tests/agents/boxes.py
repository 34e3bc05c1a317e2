"""An environment with a tool for agents of other people's libraries: which number is in a box?

The classes differ in how a policy of their demonstrations says the answer, because libraries ask for it in their own
ways: as text, by a call of a tool of theirs, or in Python.
"""

import json
import random
import re

BOXES = ("red", "blue", "green")
CALLING = "Calling tools:\n"
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


def call(name, **arguments):
    """A call as the policy writes it."""
    return CALL % (name, json.dumps(arguments))


def as_text(name, arguments):
    """A call as smolagents puts it into the history."""
    return CALLING + str(
        [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    )


class Text:
    """The answer is the number."""

    opening = "%s"
    """The question as the library puts it."""

    @staticmethod
    def tasks(split):
        """A row for each box; the seed draws the numbers."""
        return [{"id": f"{box}-{split}", "box": box, "split": split} for box in BOXES]

    @classmethod
    def demonstrate(cls, request):
        """Look into the box, then say what is in it."""
        from realhf.api.environment import Demonstration
        from realhf.env.loader.tasks import Row, RowTaskSet, tasks_of_rows

        tasks = RowTaskSet(
            tasks_of_rows([Row(row, "tasks") for row in cls.tasks("train")]), seeded=True
        )
        draw = random.Random(request.seed)
        for template in tasks.group_of:
            for _ in request.kinds():
                task = tasks.instantiate(template, draw.getrandbits(31))
                boxes = cls()
                boxes.reset(**task.payload, seed=task.seed)
                for turns, learned in cls._plays(boxes.box, boxes.numbers[boxes.box]):
                    yield Demonstration(task, turns, learned)

    @classmethod
    def _plays(cls, box, number):
        """Yield the turns of each demonstration, and which of them are learned."""
        yield (call("look", box=box), cls._answer(number)), ()

    @staticmethod
    def _answer(number):
        """The last turn of a demonstration."""
        return str(number)

    def reset(self, box, split="", seed=0, **row):
        """Begin an episode."""
        draw = random.Random(f"{split} {box} {seed}")
        self.box = box
        self.numbers = {each: draw.randrange(10) for each in BOXES}
        self.looked = self.right = self.done = False
        return self.opening % f"Which number is in the {box} box?"

    def look(self, box: str) -> str:
        """
        Look into a box.

        Args:
            box: red, blue or green

        Returns:
            The number in it.
        """
        if box not in self.numbers:
            raise ValueError(f"the boxes are {', '.join(BOXES)}")
        self.looked = self.looked or box == self.box
        return str(self.numbers[box])

    def user_reply(self, text):
        """A turn without a call is the answer."""
        self._conclude(text)

    def _conclude(self, text):
        """End the episode with an answer, whose last number counts."""
        said = re.findall("[0-9]+", str(text))
        self.right = said[-1:] == [str(self.numbers[self.box])]
        self.done = True

    def get_reward(self) -> float:
        """A quarter for the look, the rest for the number."""
        return 0.25 * self.looked + 0.75 * self.right

    @property
    def metrics(self):
        """``success`` is what evaluation counts."""
        return {"success": float(self.right)}


class PydanticAi(Text):
    """The answer is a call of the tool by which pydantic-ai asks for its ``output_type``."""

    @staticmethod
    def _answer(number):
        """The last turn of a demonstration."""
        return call("final_result", number=number)

    def final_result(self, number: int) -> str:
        """
        Say the answer.

        Args:
            number: the number
        """
        self._conclude(number)
        return "ok"


class LangGraph(Text):
    """The answer is a call of the tool by which LangGraph asks for a ``Found``."""

    @staticmethod
    def _answer(number):
        """The last turn of a demonstration."""
        return call("Found", number=number)

    def Found(self, number: int) -> str:
        """
        Say the answer.

        Args:
            number: the number
        """
        self._conclude(number)
        return "ok"


class CrewAi(Text):
    """The answer is the number, the question that of a crew."""

    opening = (
        "\nCurrent Task: %s\n\nThis is the expected criteria for your final answer: the number\nyou MUST return the"
        " actual complete content as the final answer, not a summary."
    )


class Smolagents(Text):
    """The answer is a call of the tool of smolagents, which puts calls as text into the history."""

    opening = "New task:\n%s"

    @classmethod
    def _plays(cls, box, number):
        """Yield the turns of each demonstration, and which of them are learned."""
        yield (call("look", box=box), cls._answer(number)), ()
        yield (as_text("look", {"box": box}), cls._answer(number)), (False, True)

    @staticmethod
    def _answer(number):
        """The last turn of a demonstration."""
        return call("final_answer", answer=number)

    def final_answer(self, answer: int) -> str:
        """
        Say the answer.

        Args:
            answer: the number
        """
        self._conclude(answer)
        return "ok"

    def user_reply(self, text):
        """What the agent makes of the result of a call that became text."""
        if text.startswith(CALLING):
            return f"Observation:\n{self.look(self.box)}"
        self._conclude(text)
        return None


class Code(Text):
    """The policy writes Python for a ``CodeAgent`` of smolagents: for even numbers in one turn, for others in two."""

    opening = "New task:\n%s"

    @classmethod
    def _plays(cls, box, number):
        """Yield the turns of each demonstration, and which of them are learned."""
        if number % 2 == 0:
            yield (f'<code>\nfinal_answer(look(box="{box}"))\n</code>',), ()
            return
        code = f'print(look(box="{box}"))'
        first = f"<code>\n{code}\n</code>\n" + as_text("python_interpreter", code)
        yield (f"<code>\n{code}\n</code>", cls._answer(number)), ()
        yield (first, cls._answer(number)), (False, True)

    @staticmethod
    def _answer(number):
        """The last turn of a demonstration."""
        return f"<code>\nfinal_answer({number})\n</code>"

    def user_reply(self, text):
        """What the agent reports of the code, for the demonstrations; None ends the episode."""
        seen = re.search(r'look\(box="(\w+)"\)', text)
        if seen is None:
            self._conclude(text)
            return None
        number = self.look(seen[1])
        if "final_answer" in text:
            self._conclude(number)
            return None
        return f"Observation:\nExecution logs:\n{number}\nLast output from code snippet:\nNone"
