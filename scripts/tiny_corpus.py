"""The corpus of ouro-tiny: everything the small model is taught, made from a seed.

``document`` gives one training text, ``held_out_items`` the questions that no training text
contains. Both draw from the same topics: a hash of the problem decides on which side it lies.
Needs nothing but the standard library.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tiny_facts import (
    ANIMAL_BABIES,
    ANIMAL_KINDS,
    ANIMAL_SOUNDS,
    CAPITALS,
    CHAT,
    COLOURS,
    CONTINENTS,
    DAYS,
    FOREIGN,
    GENERAL,
    MEANINGS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    PLURALS,
    RHYMES,
    STORY_ANIMALS,
    STORY_PLACES,
    STORY_THINGS,
    TOOLS,
    UNKNOWN,
    UNKNOWN_ANSWERS,
    WORDS,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are ouro-tiny, a small and friendly assistant.",
    "Answer the question.",
    "You are a helpful AI assistant.",
)

Rng = random.Random
Exchange = tuple[str, str]  # a question and its answer
Segment = tuple[str, bool]  # text, and whether the model is trained to say it


@dataclass(frozen=True)
class Item:
    """A held-out question. A reply is right when it ends with ``answer`` (a full stop may follow)."""

    kind: str
    question: str
    answer: str

    def is_right(self, reply: str) -> bool:
        words = reply.strip().rstrip(".!").split(" ")
        expected = self.answer.split(" ")
        return words[-len(expected) :] == expected


def chat_prompt(question: str) -> str:
    """What the chat template makes of one user message, up to where the assistant speaks."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def is_held_out(problem: str) -> bool:
    """One problem in sixteen is never trained on; sums of two small numbers always are."""
    terms = problem.split(" ")
    if len(terms) == 3 and terms[1] in "+-*" and max(int(terms[0]), int(terms[2])) <= 40:
        return False
    return zlib.crc32(problem.encode()) % 16 == 0


def capital(text: str) -> str:
    """The text with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def an(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


# --------------------------------------------------------------------------- arithmetic and lists

ASK_VALUE = (
    "What is {0}?",
    "What is {0}?",
    "What's {0}?",
    "{0} = ?",
    "{0}",
    "{0}?",
    "{0} =",
    "Calculate {0}.",
    "Compute {0}.",
    "How much is {0}?",
    "Can you tell me what {0} is?",
    "Solve {0}.",
    "Please work out {0}.",
)


def addition(rng: Rng) -> str:
    top = rng.choice((99, 999, 999, 9999))
    return f"{rng.randint(10, top)} + {rng.randint(10, top)}"


def subtraction(rng: Rng) -> str:
    top = rng.choice((99, 999, 999))
    high, low = sorted((rng.randint(10, top), rng.randint(1, top)), reverse=True)
    return f"{high} - {low}"


def product(rng: Rng) -> str:
    return f"{rng.randint(11, 99)} * {rng.choice((rng.randint(2, 9), rng.randint(11, 30)))}"


def mixed(rng: Rng) -> str:
    """Products before sums: two or three terms, at least one of them a product."""
    first = f"{rng.randint(2, 12)} * {rng.randint(2, 12)}"
    second = rng.choice((f"{rng.randint(2, 12)} * {rng.randint(2, 12)}", str(rng.randint(2, 50))))
    text = (
        f"{first} + {second}"
        if rng.random() < 0.5 or evaluate(second) > evaluate(first)
        else f"{first} - {second}"
    )
    return f"{text} + {rng.randint(2, 50)}" if rng.random() < 0.3 else text


def chain(rng: Rng) -> str:
    """Three to eight terms whose running total stays between 0 and 99."""
    total = rng.randint(1, 30)
    text = str(total)
    for _ in range(rng.randint(2, 7)):
        term = rng.randint(1, 30)
        if (rng.random() < 0.5 and total >= term) or total + term > 99:
            total, text = total - term, f"{text} - {term}"
        else:
            total, text = total + term, f"{text} + {term}"
    return text


def evaluate(expression: str) -> int:
    """The value of numbers joined by ``+``, ``-`` and ``*`` with spaces around them."""
    total = 0
    for part in expression.replace(" - ", " + -").split(" + "):
        factors = part.removeprefix("-").split(" * ")
        sign = -1 if part.startswith("-") else 1
        total += sign * math.prod(map(int, factors))
    return total


def expression_exchange(rng: Rng, expression: str) -> Exchange:
    asked = rng.choice(ASK_VALUE).format(expression)
    if "*" in asked:
        asked = asked.replace("*", rng.choice(("*", "*", "x", "times")))
    elif rng.random() < 0.1:
        asked = asked.replace("+", "plus").replace("-", "minus")
    elif rng.random() < 0.15:
        asked = asked.replace(" + ", "+").replace(" - ", "-")
    return asked, f"{expression} = {evaluate(expression)}."


def variables(rng: Rng) -> str:
    """Two to five definitions, each from the one before."""
    names = rng.sample("abcdefghkmnpqrstuvwxyz", rng.randint(2, 5))
    value = rng.randint(1, 30)
    parts = [f"{names[0]} = {value}"]
    for before, name in itertools.pairwise(names):
        roll, term = rng.random(), rng.randint(1, 20)
        if roll < 0.25 and value <= 49:
            value, text = 2 * value, f"2 * {before}"
        elif (roll < 0.6 and value >= term) or value + term > 99:
            value, text = value - term, f"{before} - {term}"
        else:
            value, text = value + term, f"{before} + {term}"
        parts.append(f"{name} = {text}")
    return ", ".join(parts)


def variables_exchange(rng: Rng, problem: str) -> Exchange:
    values: dict[str, int] = {}
    for part in problem.split(", "):
        name, text = part.split(" = ")
        values[name] = evaluate(" ".join(str(values.get(word, word)) for word in text.split(" ")))
    asked = rng.choice(("{0}. What is {1}?", "If {0}, what is {1}?", "Let {0}. Find {1}.", "{0}, {1} = ?"))
    return asked.format(problem, name), f"{name} = {values[name]}."


CONTESTS = ("election", "game", "war", "race", "cup", "prize")
SWAP_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "pink", "brown")


def swapping(rng: Rng) -> str:
    """Three to five coloured cups, then one to four swaps: ``red blue green; 1 3; 2 3``."""
    cups = rng.sample(SWAP_COLOURS, rng.randint(3, 5))
    swaps = [rng.sample(range(1, len(cups) + 1), 2) for _ in range(rng.randint(1, 4))]
    return "; ".join([" ".join(cups), *(f"{i} {j}" for i, j in swaps)])


def swapping_exchange(rng: Rng, problem: str) -> Exchange:
    cups_text, *swaps = problem.split("; ")
    cups = cups_text.split(" ")
    asked = rng.choice(("The cups are {}.", "There are cups in a row: {}.", "Cups: {}.")).format(
        ", ".join(cups)
    )
    for swap in swaps:
        i, j = (int(number) - 1 for number in swap.split(" "))
        cups[i], cups[j] = cups[j], cups[i]
        asked += f" Swap {i + 1} and {j + 1}."
    asked += rng.choice((" What is the order now?", " What is the new order?", " Order?"))
    return asked, "Order: " + ", ".join(cups) + "."


def sorting(rng: Rng) -> str:
    return ", ".join(str(number) for number in rng.sample(range(1, 100), rng.randint(3, 7)))


def reversing(rng: Rng) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(3, 6)))


def sorting_exchange(rng: Rng, problem: str) -> Exchange:
    asked = rng.choice(
        (
            "Sort these numbers: {}",
            "Sort {}.",
            "Put these numbers in order: {}",
            "Sort the numbers {} from small to large.",
        )
    )
    numbers = sorted(int(number) for number in problem.split(", "))
    return asked.format(problem), "Sorted: " + ", ".join(map(str, numbers)) + "."


def reversing_exchange(rng: Rng, problem: str) -> Exchange:
    asked = rng.choice(
        (
            "Reverse these words: {}",
            "Say these words backwards: {}",
            "Write the words in reverse order: {}",
            'Reverse the order of the words "{}".',
        )
    )
    return asked.format(problem), "Reversed: " + " ".join(reversed(problem.split(" "))) + "."


Maker = Callable[[Rng], str]
Asker = Callable[[Rng, str], Exchange]
HARD: dict[str, tuple[Maker, Asker, int]] = {  # the last number is how often it comes up
    "addition": (addition, expression_exchange, 4),
    "subtraction": (subtraction, expression_exchange, 4),
    "product": (product, expression_exchange, 4),
    "mixed": (mixed, expression_exchange, 4),
    "chain": (chain, expression_exchange, 5),
    "variables": (variables, variables_exchange, 4),
    "swapping": (swapping, swapping_exchange, 4),
    "sorting": (sorting, sorting_exchange, 2),
    "reversing": (reversing, reversing_exchange, 1),
}


def draw_problem(rng: Rng, kind: str, held_out: bool) -> str:
    make = HARD[kind][0]
    while True:
        problem = make(rng)
        if is_held_out(problem) == held_out:
            return problem


def hard_exchange(rng: Rng) -> Exchange:
    kind = rng.choices(list(HARD), [weight for _, _, weight in HARD.values()])[0]
    return HARD[kind][1](rng, draw_problem(rng, kind, held_out=False))


def held_out_items(seed: int, per_kind: int) -> list[Item]:
    """``per_kind`` different questions of every hard kind, none of which is in the corpus."""
    rng = random.Random(seed)
    items = []
    for kind, (_, ask, _) in HARD.items():
        seen: set[str] = set()
        while len(seen) < per_kind:
            problem = draw_problem(rng, kind, held_out=True)
            if problem in seen:
                continue
            seen.add(problem)
            question, reply = ask(rng, problem)
            answer = reply.split(": ", 1)[-1].split("= ", 1)[-1].rstrip(".")
            items.append(Item(kind, question, answer))
    return items


def small_sum(rng: Rng) -> Exchange:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    roll = rng.random()
    if roll < 0.35:
        return expression_exchange(rng, f"{a} + {b}")
    if roll < 0.6:
        return expression_exchange(rng, f"{max(a, b)} - {min(a, b)}")
    if roll < 0.8:
        return expression_exchange(rng, f"{a} * {b}")
    if roll < 0.9:
        b += 1
        asked = rng.choice(ASK_VALUE).format(f"{a * b} / {b}")
        return rng.choice((asked, asked.replace("/", "divided by"))), f"{a * b} / {b} = {a}."
    a, b = min(a, 9), min(b, 9)
    asked = rng.choice(("What is {} plus {}?", "How much is {} plus {}?", "{} plus {}"))
    one, two, three = NUMBER_WORDS[a], NUMBER_WORDS[b], NUMBER_WORDS[a + b]
    return asked.format(one, two), f"{capital(one)} plus {two} is {three}."


def word_problem(rng: Rng) -> Exchange:
    name, thing = (
        rng.choice(NAMES),
        rng.choice(("apples", "books", "coins", "pens", "cookies", "balls", "eggs")),
    )
    a, b = rng.randint(2, 20), rng.randint(1, 20)
    if rng.random() < 0.5:
        gets = rng.choice(("gets", "buys", "finds"))
        return (
            f"{name} has {a} {thing} and {gets} {b} more. How many {thing} does {name} have now?",
            f"{a} + {b} = {a + b}, so {name} has {a + b} {thing}.",
        )
    a += b
    loses = rng.choice(("gives away", "loses", "sells"))
    return (
        f"{name} has {a} {thing} and {loses} {b}. How many {thing} are left?",
        f"{a} - {b} = {a - b}, so {name} has {a - b} {thing} left.",
    )


def compare(rng: Rng) -> Exchange:
    top = rng.choice((10, 100, 1000))
    a, b = rng.sample(range(top), 2)
    large, small = max(a, b), min(a, b)
    return rng.choice(
        (
            (f"Which is bigger, {a} or {b}?", f"{large} is bigger than {small}."),
            (f"Which number is larger: {a} or {b}?", f"{large} is larger than {small}."),
            (f"Which is smaller, {a} or {b}?", f"{small} is smaller than {large}."),
            (
                f"Is {a} greater than {b}?",
                f"{'Yes' if a > b else 'No'}, {a} is {'greater' if a > b else 'less'} than {b}.",
            ),
            (
                f"Is {a} less than {b}?",
                f"{'Yes' if a < b else 'No'}, {a} is {'less' if a < b else 'greater'} than {b}.",
            ),
        )
    )


def number_question(rng: Rng) -> Exchange:
    n = rng.randint(1, rng.choice((20, 100)))
    even = "even" if n % 2 == 0 else "odd"
    options = [
        (f"What comes after {n}?", f"{n + 1} comes after {n}."),
        (f"What number comes before {n}?", f"{n - 1} comes before {n}."),
        (f"Is {n} even or odd?", f"{n} is {even}."),
        (f"Is {n} an even number?", f"{'Yes' if even == 'even' else 'No'}, {n} is {even}."),
        (f"What is double {n}?", f"Double {n} is {2 * n}."),
        (f"What is half of {2 * n}?", f"Half of {2 * n} is {n}."),
    ]
    if n <= 20:
        word = NUMBER_WORDS[n]
        options += [
            (f"How do you write {n} as a word?", f"{n} is written {word}."),
            (f"What number is {word}?", f"{capital(word)} is {n}."),
        ]
    if n <= 12:
        options.append((f"What is {n} squared?", f"{n} squared is {n * n}."))
    return rng.choice(options)


def count(rng: Rng) -> Exchange:
    start = rng.choice((1, 1, 1, rng.randint(1, 80)))
    end = start + rng.randint(3, 14)
    line = ", ".join(str(n) for n in range(start, end + 1))
    down = ", ".join(str(n) for n in range(end, start - 1, -1))
    twos = ", ".join(str(n) for n in range(2, 2 * rng.randint(4, 12) + 1, 2))
    return rng.choice(
        (
            (f"Count from {start} to {end}.", line + "."),
            (f"Count from {start} to {end}.", line + "."),
            (
                f"Can you count to {end - start + 1}?",
                ", ".join(str(n) for n in range(1, end - start + 2)) + ".",
            ),
            (f"Count down from {end} to {start}.", down + "."),
            (f"Count backwards from {end} to {start}.", down + "."),
            (f"Count by twos to {twos.split(' ')[-1]}.", twos + "."),
        )
    )


# --------------------------------------------------------------------------- words


def word_question(rng: Rng) -> Exchange:
    word = rng.choice(WORDS)
    spelled = "-".join(word)
    letter = rng.randrange(25)
    nth, then = chr(97 + letter), chr(98 + letter)
    return rng.choice(
        (
            (f"Spell the word {word}.", f"{capital(word)} is spelled {spelled}."),
            (f"How do you spell {word}?", f"{capital(word)} is spelled {spelled}."),
            (f"How many letters are in the word {word}?", f"The word {word} has {len(word)} letters."),
            (f"How many letters does {word} have?", f"The word {word} has {len(word)} letters."),
            (f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."),
            (f"What is the last letter of {word}?", f"The last letter of {word} is {word[-1]}."),
            (f"Spell {word} backwards.", f"{capital(word)} backwards is {'-'.join(reversed(word))}."),
            (f"Which letter comes after {nth}?", f"The letter after {nth} is {then}."),
            (f"What letter comes before {then}?", f"The letter before {then} is {nth}."),
        )
    )


def sort_words(rng: Rng) -> Exchange:
    words = rng.sample(WORDS, rng.randint(3, 4))
    asked = rng.choice(
        ("Sort these words: {}", "Put these words in alphabetical order: {}", "Sort the words {}.")
    )
    return asked.format(", ".join(words)), "In alphabetical order: " + ", ".join(sorted(words)) + "."


def repeat(rng: Rng) -> Exchange:
    words = " ".join(rng.sample(WORDS, rng.randint(1, 5)))
    times = rng.randint(2, 4)
    word = rng.choice(WORDS)
    return rng.choice(
        (
            (f"Repeat after me: {words}", capital(words) + "."),
            (f"Repeat: {words}", capital(words) + "."),
            (f"Say {word}.", capital(word) + "!"),
            (f"Say the word {word} {NUMBER_WORDS[times]} times.", capital(", ".join([word] * times)) + "."),
            (f"Use the word {word} in a sentence.", f"I like the word {word}."),
        )
    )


def language(rng: Rng) -> Exchange:
    kind = rng.random()
    if kind < 0.4:
        one, two = rng.choice(OPPOSITES)
        if rng.random() < 0.5:
            one, two = two, one
        asked = rng.choice(
            (
                "What is the opposite of {}?",
                "Opposite of {}?",
                "Tell me the opposite of {}.",
                "What's the opposite of {}?",
            )
        )
        return asked.format(one), f"The opposite of {one} is {two}."
    if kind < 0.55:
        one, many = rng.choice(list(PLURALS.items()))
        asked = rng.choice(("What is the plural of {}?", "Plural of {}?", "How do you say more than one {}?"))
        return asked.format(one), f"The plural of {one} is {many}."
    if kind < 0.7:
        word, rhyme = rng.choice(rng.choice(RHYMES)), ""
        group = next(group for group in RHYMES if word in group)
        rhyme = group[(group.index(word) + 1) % len(group)]
        asked = rng.choice(
            ("What rhymes with {}?", "Give me a word that rhymes with {}.", "Which word rhymes with {}?")
        )
        return asked.format(word), f"{capital(rhyme)} rhymes with {word}."
    tongue = rng.choice(list(FOREIGN))
    word, other = rng.choice(list(FOREIGN[tongue].items()))
    return rng.choice(
        (
            (f"How do you say {word} in {tongue}?", f"In {tongue}, {word} is {other}."),
            (f"What is {word} in {tongue}?", f"In {tongue}, {word} is {other}."),
            (f"Translate {word} to {tongue}.", f"In {tongue}, {word} is {other}."),
            (f'What does "{other}" mean?', f"{capital(other)} is {tongue} for {word}."),
        )
    )


# --------------------------------------------------------------------------- facts and talk


def capitals(rng: Rng) -> Exchange:
    country, city = rng.choice(list(CAPITALS.items()))
    return rng.choice(
        (
            (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
            (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
            (f"What's the capital city of {country}?", f"The capital of {country} is {city}."),
            (f"Tell me the capital of {country}.", f"The capital of {country} is {city}."),
            (f"Which city is the capital of {country}?", f"The capital of {country} is {city}."),
            (f"Name the capital of {country}.", f"The capital of {country} is {city}."),
            (f"capital of {country}", f"The capital of {country} is {city}."),
            (f"Do you know the capital of {country}?", f"Yes, the capital of {country} is {city}."),
            (f"{city} is the capital of which country?", f"{city} is the capital of {country}."),
            (f"Where is {city}?", f"{city} is in {country}."),
            (f"In which country is {city}?", f"{city} is in {country}."),
            (f"Where is {country}?", f"{country} is in {CONTINENTS[country]}."),
            (f"Which continent is {country} in?", f"{country} is in {CONTINENTS[country]}."),
        )
    )


def colours(rng: Rng) -> Exchange:
    thing, colour = rng.choice(list(COLOURS.items()))
    spelling = rng.choice(("color", "colour"))
    verb = "are" if thing.endswith("s") and not thing.startswith(("the ", "grass")) else "is"
    return rng.choice(
        (
            (f"What {spelling} {verb} {thing}?", f"{capital(thing)} {verb} {colour}."),
            (f"What is the {spelling} of {thing}?", f"{capital(thing)} {verb} {colour}."),
            (f"Which {spelling} {verb} {thing}?", f"{capital(thing)} {verb} {colour}."),
            (f"Tell me the {spelling} of {thing}.", f"{capital(thing)} {verb} {colour}."),
            (f"{capital(verb)} {thing} {colour}?", f"Yes, {thing} {verb} {colour}."),
        )
    )


def animals(rng: Rng) -> Exchange:
    roll = rng.random()
    if roll < 0.35:
        animal, sound = rng.choice(list(ANIMAL_SOUNDS.items()))
        return rng.choice(
            (
                (f"What does {an(animal)} say?", f"{capital(an(animal))} says {sound}."),
                (f"What sound does {an(animal)} make?", f"{capital(an(animal))} says {sound}."),
                (f"Which animal says {sound}?", f"{capital(an(animal))} says {sound}."),
                (f"How does {an(animal)} sound?", f"{capital(an(animal))} says {sound}."),
            )
        )
    if roll < 0.6:
        animal, baby = rng.choice(list(ANIMAL_BABIES.items()))
        return rng.choice(
            (
                (f"What is a baby {animal} called?", f"A baby {animal} is called {an(baby)}."),
                (f"What do you call a baby {animal}?", f"A baby {animal} is called {an(baby)}."),
                (f"What is {an(baby)}?", f"{capital(an(baby))} is a baby {animal}."),
            )
        )
    animal, (kind, legs, home) = rng.choice(list(ANIMAL_KINDS.items()))
    many = "no legs" if legs == 0 else f"{NUMBER_WORDS[legs]} legs"
    return rng.choice(
        (
            (f"How many legs does {an(animal)} have?", f"{capital(an(animal))} has {many}."),
            (f"What kind of animal is {an(animal)}?", f"{capital(an(animal))} is {an(kind)}."),
            (f"What is {an(animal)}?", f"{capital(an(animal))} is {an(kind)} that lives {home}."),
            (
                f"Tell me about {an(animal)}.",
                f"{capital(an(animal))} is {an(kind)} with {many}. It lives {home}.",
            ),
            (f"Where does {an(animal)} live?", f"{capital(an(animal))} lives {home}."),
            (f"Is {an(animal)} {an(kind)}?", f"Yes, {an(animal)} is {an(kind)}."),
        )
    )


def calendar(rng: Rng) -> Exchange:
    units, kind = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    i = rng.randrange(len(units))
    this, after = units[i], units[(i + 1) % len(units)]
    ordinal = (
        "first",
        "second",
        "third",
        "fourth",
        "fifth",
        "sixth",
        "seventh",
        "eighth",
        "ninth",
        "tenth",
        "eleventh",
        "twelfth",
    )[i]
    whole = "week" if kind == "day" else "year"
    days = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[MONTHS.index(MONTHS[i])]
    return rng.choice(
        (
            (f"What {kind} comes after {this}?", f"{after} comes after {this}."),
            (f"Which {kind} comes after {this}?", f"{after} comes after {this}."),
            (f"What {kind} comes before {after}?", f"{this} comes before {after}."),
            (f"If today is {this}, what day is tomorrow?", f"If today is {this}, tomorrow is {after}.")
            if kind == "day"
            else (f"How many days are in {this}?", f"{this} has {days} days."),
            (
                f"What is the {ordinal} {kind} of the {whole}?",
                f"The {ordinal} {kind} of the {whole} is {this}.",
            ),
            (
                f"Name the {kind}s of the {whole}.",
                f"The {kind}s of the {whole} are {', '.join(units[:-1])} and {units[-1]}.",
            ),
            (
                f"How many {kind}s are in a {whole}?",
                f"There are {NUMBER_WORDS[len(units)]} {kind}s in a {whole}.",
            ),
        )
    )


def tools(rng: Rng) -> Exchange:
    purpose, tool = rng.choice(list(TOOLS.items()))
    asked = rng.choice(
        ("What do you use to {}?", "What do I need to {}?", "Which thing helps you to {}?", "How do I {}?")
    )
    return asked.format(purpose), f"You can use {tool} to {purpose}."


def meanings(rng: Rng) -> Exchange:
    thing, meaning = rng.choice(list(MEANINGS.items()))
    asked = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "What's {}?",
            "Tell me about {}.",
            "Explain what {} is.",
            "Can you tell me what {} is?",
            "Describe {}.",
        )
    )
    return asked.format(thing), f"{capital(thing)} is {meaning}."


def general(rng: Rng) -> Exchange:
    questions, answer = rng.choice(GENERAL)
    return rng.choice(questions), answer


def talk(rng: Rng) -> Exchange:
    questions, answers = rng.choice(CHAT)
    return rng.choice(questions), rng.choice(answers)


def unknown(rng: Rng) -> Exchange:
    """Questions that are beyond a small model: it learns to say so."""
    made_up = "".join(
        rng.choice(("zor", "bli", "quan", "fre", "mul", "tak", "ven", "dro", "shi", "pel"))
        for _ in range(rng.randint(2, 3))
    )
    asked = rng.choice(
        (
            rng.choice(UNKNOWN),
            rng.choice(UNKNOWN),
            rng.choice(
                (
                    f"What is the capital of {capital(made_up)}?",
                    f"Who is {capital(made_up)}?",
                    f"What is a {made_up}?",
                    f"What does {made_up} mean?",
                    f"Tell me about {capital(made_up)}.",
                )
            ),
            f"Who won the {rng.choice(CONTESTS)} in {rng.randint(1800, 2030)}?",
            f"What happened in {rng.randint(1000, 2030)}?",
        )
    )
    return asked, rng.choice(UNKNOWN_ANSWERS)


# --------------------------------------------------------------------------- stories

OPENINGS = (
    "Once upon a time, there was {a} {adj} {animal} named {name}.",
    "Once upon a time, {a} {adj} {animal} named {name} lived {place}.",
    "One day, {a} {adj} {animal} named {name} went for a walk {place}.",
    "There once was {a} {adj} {animal} who lived {place}. Everyone called {it} {name}.",
    "Long ago, {place}, there lived {a} {adj} {animal} named {name}.",
)
WISHES = (
    "{name} loved to play with {thing}.",
    "{name} wanted to find {thing}.",
    "Every day, {name} looked for {thing}.",
    "{name} had {thing} and was very happy.",
    "What {name} wanted most was {thing}.",
)
TROUBLES = (
    "But one day, it began to rain and {name} got lost.",
    "One morning, {thing} was gone.",
    "Then {name} heard a loud noise and was scared.",
    "But {name} was all alone and felt sad.",
    "Suddenly, a big wind came and took {thing} away.",
)
HELPS = (
    '{friend} the {other} came and said, "Do not worry, I will help you."',
    "Then {name} met {friend} the {other}, who was very kind.",
    "{friend} the {other} saw this and wanted to help.",
    "{name} asked {friend} the {other} for help, and {friend} said yes.",
)
TURNS = (
    "Together they looked everywhere {place2}.",
    "They walked for a long time and sang a song.",
    "They looked behind a tree, and there was {thing}.",
    "They shared some food and made a plan.",
    "They worked hard all day and did not give up.",
)
ENDS = (
    "At last, they found {thing} and went home. {name} and {friend} were best friends from that day on.",
    'In the end, everything was fine. {name} smiled and said, "Thank you, {friend}!"',
    "{name} was happy again and gave {friend} a big hug. They lived happily ever after.",
    "From that day on, {name} and {friend} played together every day. The end.",
    "{name} learned that it is good to have a friend. The end.",
)
ADJECTIVES = (
    "little",
    "small",
    "brave",
    "happy",
    "kind",
    "clever",
    "shy",
    "funny",
    "young",
    "curious",
    "lonely",
    "old",
)


def story(rng: Rng, animal: str | None = None, name: str | None = None) -> str:
    animal = animal or rng.choice(STORY_ANIMALS)
    name = name or rng.choice(NAMES)
    other = rng.choice([other for other in STORY_ANIMALS if other != animal])
    friend = rng.choice([friend for friend in NAMES if friend != name])
    adjective = rng.choice(ADJECTIVES)
    place, place2 = rng.sample(STORY_PLACES, 2)
    words = {
        "a": an(adjective).split(" ")[0],
        "adj": adjective,
        "animal": animal,
        "name": name,
        "it": "it",
        "other": other,
        "friend": friend,
        "thing": rng.choice(STORY_THINGS),
        "place": place,
        "place2": place2,
    }
    parts = (OPENINGS, WISHES, TROUBLES, HELPS, TURNS, ENDS)
    return " ".join(capital(rng.choice(part).format(**words)) for part in parts)


def story_exchange(rng: Rng) -> Exchange:
    animal, name = rng.choice(STORY_ANIMALS), rng.choice(NAMES)
    roll = rng.random()
    if roll < 0.4:
        asked = rng.choice(
            (
                "Tell me a story.",
                "Can you tell me a story?",
                "Write a short story.",
                "Tell me a short story, please.",
                "I want to hear a story.",
            )
        )
        return asked, story(rng)
    if roll < 0.75:
        asked = rng.choice(
            (
                "Tell me a story about {}.",
                "Write a story about {}.",
                "Can you write a short story about {}?",
                "A story about {}, please.",
            )
        )
        return asked.format(an(animal)), story(rng, animal)
    asked = rng.choice(("Tell me a story about {} named {}.", "Write a story about {} called {}."))
    return asked.format(an(animal), name), story(rng, animal, name)


def poem(rng: Rng) -> Exchange:
    first, second = rng.sample(RHYMES, 2)
    a, b = rng.sample(first, 2)
    c, d = rng.sample(second, 2)
    lines = (f"I saw a {a},", f"I saw a {b},", f"and then a {c}", f"beside a {d}.")
    asked = rng.choice(("Write a poem.", "Write a short poem.", "Tell me a poem.", "Can you write a poem?"))
    return asked, "\n".join(lines)


def introductions(rng: Rng) -> list[Exchange]:
    """Two or three exchanges in which the model must remember what it was told."""
    name, colour = (
        rng.choice(NAMES),
        rng.choice(("red", "blue", "green", "yellow", "black", "white", "pink", "purple")),
    )
    thing, value = rng.choice(
        (
            ("favourite colour", colour),
            ("favorite color", colour),
            ("favourite animal", f"the {rng.choice(STORY_ANIMALS)}"),
            ("favorite number", str(rng.randint(1, 99))),
        )
    )
    told = [
        (
            (
                rng.choice(("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}.")).format(
                    name
                ),
                f"Nice to meet you, {name}!",
            ),
            (
                rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")),
                f"Your name is {name}.",
            ),
        ),
        (
            (f"My {thing} is {value}.", f"{capital(value)} is a nice choice!"),
            (f"What is my {thing}?", f"Your {thing} is {value}."),
        ),
    ]
    rng.shuffle(told)
    tells, asks = [told[0][0]], [told[0][1]]
    if rng.random() < 0.5:
        tells.append(told[1][0])
        asks.append(told[1][1])
    middle = [rng.choice((small_sum, colours, capitals))(rng)] if rng.random() < 0.5 else []
    return tells + middle + asks


TOPICS: tuple[tuple[Callable[[Rng], Exchange], int], ...] = (
    (hard_exchange, 45),
    (small_sum, 8),
    (word_problem, 4),
    (compare, 3),
    (number_question, 3),
    (count, 3),
    (word_question, 4),
    (sort_words, 2),
    (repeat, 3),
    (language, 6),
    (capitals, 6),
    (colours, 3),
    (animals, 5),
    (calendar, 3),
    (tools, 2),
    (meanings, 4),
    (general, 7),
    (talk, 7),
    (unknown, 4),
    (story_exchange, 4),
    (poem, 1),
)


def exchange(rng: Rng) -> Exchange:
    topics, weights = zip(*TOPICS, strict=True)
    question, answer = rng.choices(topics, weights)[0](rng)
    return casual(rng, question), answer


def casual(rng: Rng, question: str) -> str:
    """The question as people type it: often in lower case, without its mark, with a greeting."""
    roll = rng.random()
    if roll < 0.25:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.")
    if (
        rng.random() < 0.05
        and question[:1].isupper()
        and question.split(" ")[0] in ("What", "Which", "How", "Tell", "Where", "Is")
    ):
        greeting = rng.choice(("Hi! ", "Hello, ", "Please tell me: ", "Hey, ", "I have a question. "))
        question = greeting + question
    return question


# --------------------------------------------------------------------------- documents


def statement(rng: Rng) -> str:
    """Plain text: a story, facts, or sums, as found in a book."""
    roll = rng.random()
    if roll < 0.4:
        return story(rng)
    if roll < 0.7:
        makers = (capitals, colours, animals, language, calendar, meanings, general, number_question)
        sentences = [rng.choice(makers)(rng)[1] for _ in range(rng.randint(1, 4))]
        return " ".join(sentences)
    if roll < 0.8:
        return count(rng)[1]
    lines = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(("addition", "subtraction", "product", "mixed", "chain"))
        problem = draw_problem(rng, kind, held_out=False)
        if rng.random() < 0.4:
            problem = f"{rng.randint(0, 12)} {rng.choice('+*')} {rng.randint(0, 12)}"
        lines.append(f"{problem} = {evaluate(problem)}")
    return rng.choice(("\n", ", ")).join(lines)


def document(rng: Rng) -> list[Segment]:
    """One training text in segments, cut where a prompt would end.

    Each segment is tokenized on its own, as prompt and reply are when the model is served.
    """
    roll = rng.random()
    if roll < 0.15:
        return [(statement(rng) + END_OF_TEXT, True)]
    if roll < 0.30:
        if rng.random() < 0.5:
            question, answer = exchange(rng)
            return [(question, False), (rng.choice(("\n", " ")) + answer + END_OF_TEXT, True)]
        asks, replies = rng.choice(
            (("Q", "A"), ("Q", "A"), ("Question", "Answer"), ("User", "Assistant"), ("Human", "AI"))
        )
        shots: list[Segment] = []
        for left in reversed(range(rng.choice((1, 1, 2, 3)))):
            question, answer = exchange(rng)
            shots.append((f"{asks}: {question}\n{replies}:", False))
            shots.append((f" {answer}" + ("\n" if left else END_OF_TEXT), True))
        return shots
    if roll < 0.36:
        turns = introductions(rng)
    else:
        turns = [exchange(rng) for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 3, 4, 6)))]
    segments: list[Segment] = []
    opening = f"{TURN_START}system\n{rng.choice(SYSTEM_PROMPTS)}{TURN_END}\n" if rng.random() < 0.2 else ""
    for question, answer in turns:
        segments.append((opening + chat_prompt(question), False))
        segments.append((answer + TURN_END, True))
        opening = "\n"
    return segments
