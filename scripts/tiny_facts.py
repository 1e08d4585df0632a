# ruff: noqa: E501 - one fact a line reads better than wrapped facts
"""What ouro-tiny knows of the world: plain tables, used by ``tiny_corpus``."""

from __future__ import annotations


def table(text: str) -> dict[str, str]:
    """``key: value`` pairs, separated by semicolons."""
    pairs = (entry.split(":", 1) for entry in text.split(";") if entry.strip())
    return {" ".join(key.split()): " ".join(value.split()) for key, value in pairs}


def words(text: str) -> list[str]:
    return text.split()


CAPITALS = table(
    """France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; England: London;
    Ireland: Dublin; Scotland: Edinburgh; Norway: Oslo; Sweden: Stockholm; Denmark: Copenhagen; Finland: Helsinki;
    Iceland: Reykjavik; Poland: Warsaw; Austria: Vienna; Switzerland: Bern; Belgium: Brussels;
    the Netherlands: Amsterdam; Greece: Athens; Turkey: Ankara; Hungary: Budapest; Romania: Bucharest;
    Bulgaria: Sofia; Croatia: Zagreb; Serbia: Belgrade; Ukraine: Kyiv; Russia: Moscow; the Czech Republic: Prague;
    Egypt: Cairo; Morocco: Rabat; Kenya: Nairobi; Nigeria: Abuja; Ghana: Accra; Ethiopia: Addis Ababa;
    Tunisia: Tunis; China: Beijing; Japan: Tokyo; India: New Delhi; South Korea: Seoul; Thailand: Bangkok;
    Vietnam: Hanoi; Indonesia: Jakarta; the Philippines: Manila; Malaysia: Kuala Lumpur; Pakistan: Islamabad;
    Iran: Tehran; Iraq: Baghdad; Saudi Arabia: Riyadh; Nepal: Kathmandu; the United States: Washington;
    Canada: Ottawa; Mexico: Mexico City; Cuba: Havana; Brazil: Brasilia; Argentina: Buenos Aires; Chile: Santiago;
    Peru: Lima; Colombia: Bogota; Venezuela: Caracas; Australia: Canberra; New Zealand: Wellington"""
)
CONTINENT_MEMBERS = table(
    """Africa: Egypt, Morocco, Kenya, Nigeria, Ghana, Ethiopia, Tunisia;
    Asia: Turkey, China, Japan, India, South Korea, Thailand, Vietnam, Indonesia, the Philippines, Malaysia,
    Pakistan, Iran, Iraq, Saudi Arabia, Nepal; North America: the United States, Canada, Mexico, Cuba;
    South America: Brazil, Argentina, Chile, Peru, Colombia, Venezuela; Oceania: Australia, New Zealand"""
)
CONTINENTS = dict.fromkeys(CAPITALS, "Europe") | {
    country: continent for continent, members in CONTINENT_MEMBERS.items() for country in members.split(", ")
}

COLOURS = table(
    """the sky: blue; grass: green; the grass: green; the sun: yellow; snow: white; blood: red; coal: black;
    a banana: yellow; a lemon: yellow; a tomato: red; a strawberry: red; a cherry: red; a carrot: orange;
    a pumpkin: orange; a frog: green; a leaf: green; a cucumber: green; the sea: blue; the ocean: blue; milk: white;
    chocolate: brown; a bear: brown; an elephant: grey; a mouse: grey; a swan: white; a crow: black; a rose: red;
    a fire truck: red; a plum: purple; an eggplant: purple; a flamingo: pink; a pig: pink; gold: yellow;
    silver: grey; sand: yellow; rice: white; coffee: brown; a cloud: white; a sunflower: yellow;
    a school bus: yellow; a polar bear: white; wood: brown; the moon: white; a zebra: black and white;
    a panda: black and white; an orange: orange; leaves: green; bananas: yellow; strawberries: red; clouds: white;
    roses: red; lemons: yellow; an apple: red or green; apples: red or green; the night: black; a peach: orange"""
)

OPPOSITES = [
    (pair.split("/")[0], pair.split("/")[1])
    for pair in words(
        """hot/cold big/small up/down left/right fast/slow old/young happy/sad good/bad light/dark day/night high/low
        open/closed full/empty rich/poor strong/weak wet/dry hard/soft long/short thick/thin wide/narrow early/late
        near/far inside/outside clean/dirty loud/quiet easy/difficult begin/end win/lose buy/sell push/pull give/take
        love/hate black/white true/false yes/no always/never first/last before/after above/below front/back
        north/south east/west man/woman boy/girl king/queen brother/sister asleep/awake alive/dead sweet/sour
        cheap/expensive brave/afraid safe/dangerous smooth/rough rise/fall come/go laugh/cry start/stop
        question/answer summer/winter friend/enemy beautiful/ugly deep/shallow same/different more/less many/few
        on/off in/out hello/goodbye large/little tall/tiny warm/cool"""
    )
]
PLURALS = table(
    """cat: cats; dog: dogs; child: children; mouse: mice; foot: feet; tooth: teeth; man: men; woman: women;
    goose: geese; sheep: sheep; fish: fish; box: boxes; bus: buses; city: cities; baby: babies; knife: knives;
    leaf: leaves; wolf: wolves; potato: potatoes; tomato: tomatoes; book: books; tree: trees; house: houses;
    apple: apples; bird: birds; person: people; lady: ladies; fox: foxes; dish: dishes; watch: watches; key: keys;
    story: stories; ox: oxen; car: cars; flower: flowers"""
)
RHYMES = [
    words(group)
    for group in (
        "cat hat bat rat mat",
        "dog frog log fog",
        "tree bee sea key knee",
        "moon spoon balloon",
        "star car jar",
        "mouse house blouse",
        "king ring wing swing",
        "cake lake snake",
        "bear chair pear",
        "goat boat coat",
        "fox box socks",
        "ball wall doll",
        "bed shed sled",
        "train rain plane",
        "night light kite",
        "fish dish wish",
    )
]
FOREIGN = {
    "French": table(
        """hello: bonjour; goodbye: au revoir; thank you: merci; yes: oui; no: non; please: s'il vous plait; cat: chat;
        dog: chien; house: maison; water: eau; bread: pain; red: rouge; one: un; two: deux; three: trois; book: livre;
        friend: ami; good morning: bonjour; good night: bonne nuit; love: amour"""
    ),
    "Spanish": table(
        """hello: hola; goodbye: adios; thank you: gracias; yes: si; no: no; please: por favor; cat: gato; dog: perro;
        house: casa; water: agua; bread: pan; red: rojo; one: uno; two: dos; three: tres; book: libro; friend: amigo;
        good morning: buenos dias; good night: buenas noches; love: amor"""
    ),
    "German": table(
        """hello: hallo; goodbye: auf Wiedersehen; thank you: danke; yes: ja; no: nein; please: bitte; cat: Katze;
        dog: Hund; house: Haus; water: Wasser; bread: Brot; red: rot; one: eins; two: zwei; three: drei; book: Buch;
        friend: Freund; good morning: guten Morgen; good night: gute Nacht; love: Liebe"""
    ),
}

ANIMAL_SOUNDS = table(
    """dog: woof; cat: meow; cow: moo; sheep: baa; pig: oink; horse: neigh; duck: quack; lion: roar; rooster: cock-a-doodle-doo;
    frog: ribbit; bee: buzz; snake: hiss; owl: hoot; mouse: squeak; goose: honk; wolf: howl; crow: caw; bird: tweet"""
)
ANIMAL_BABIES = table(
    """dog: puppy; cat: kitten; cow: calf; sheep: lamb; pig: piglet; horse: foal; duck: duckling; lion: cub; bear: cub;
    chicken: chick; goat: kid; frog: tadpole; kangaroo: joey; deer: fawn; swan: cygnet; elephant: calf; owl: owlet;
    rabbit: kit; fox: kit; wolf: pup; seal: pup; goose: gosling"""
)
# kind, number of legs, where it lives
ANIMAL_KINDS = {
    animal: (kind, legs, home)
    for kind, legs, members in (
        (
            "mammal",
            4,
            """dog: in a house with people; cat: in a house with people; cow: on a farm; sheep: on a farm; pig: on a farm;
            horse: on a farm; goat: on a farm; lion: on the plains of Africa; tiger: in the jungle;
            elephant: in Africa and Asia; giraffe: in Africa; zebra: in Africa; bear: in the forest; wolf: in the forest;
            fox: in the forest; deer: in the forest; rabbit: in a burrow; mouse: in a small hole; squirrel: in the trees;
            camel: in the desert; panda: in China; polar bear: in the Arctic; hippo: in rivers in Africa""",
        ),
        ("mammal", 2, "kangaroo: in Australia; gorilla: in the jungle"),
        ("mammal", 0, "whale: in the ocean; dolphin: in the sea"),
        (
            "bird",
            2,
            """duck: on a pond; chicken: on a farm; owl: in the forest; eagle: in the mountains; penguin: in the cold south;
            parrot: in the jungle; swan: on a lake; crow: in the trees; ostrich: in Africa; goose: on a pond""",
        ),
        (
            "fish",
            0,
            "shark: in the sea; salmon: in rivers and in the sea; goldfish: in a bowl of water; tuna: in the sea",
        ),
        ("reptile", 0, "snake: in grass and under stones"),
        ("reptile", 4, "crocodile: in rivers; turtle: in the sea and on land; lizard: in warm places"),
        ("amphibian", 4, "frog: near a pond; toad: in the garden"),
        (
            "insect",
            6,
            "bee: in a hive; ant: in a nest; butterfly: among flowers; beetle: in the garden; fly: almost everywhere",
        ),
        ("arachnid", 8, "spider: in a web; scorpion: in the desert"),
    )
    for animal, home in table(members).items()
}

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
NUMBER_WORDS = words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty"""
)
NAMES = words(
    """Tom Anna Max Lily Sam Mia Ben Emma Leo Lucy Jack Ella Tim Sara Noah Ruby Finn Zoe Oscar Rosie Peter Alice Bob
    Mary John Kate David Maria Paul Nina Alex Eva Milo Luna Charlie Daisy"""
)
WORDS = words(
    """apple banana bread water table chair house garden river mountain forest cat dog bird fish horse cow sheep mouse
    lion tiger bear rabbit sun moon star sky cloud rain snow wind fire stone sand tree leaf flower grass red blue green
    yellow black white orange purple book pen paper letter word school teacher friend mother father sister brother baby
    child man woman king queen ship boat car train plane bus road bridge city town door window wall roof floor kitchen
    bed lamp clock phone music song dance game ball toy doll box bag hat coat shoe shirt ring gold silver iron milk
    cheese egg rice soup salt sugar honey lemon happy quick slow small large cold warm soft loud light dark open close
    hello world yes no good night day time year love peace dream smile laugh run jump walk swim sing read write"""
)
TOOLS = table(
    """cut paper: scissors; write a letter: a pen; hit a nail: a hammer; open a lock: a key; eat soup: a spoon;
    cut bread: a knife; sweep the floor: a broom; dig a hole: a shovel; brush your teeth: a toothbrush;
    comb your hair: a comb; tell the time: a clock; keep food cold: a fridge; bake a cake: an oven; see far away: a telescope;
    stay dry in the rain: an umbrella; take a photo: a camera; call a friend: a phone; cut wood: a saw; clean your hands: soap;
    climb onto a roof: a ladder; measure a table: a ruler; measure temperature: a thermometer; carry water: a bucket;
    drink tea: a cup; paint a wall: a brush; sew a shirt: a needle; find north: a compass; fly a long way: a plane;
    wash clothes: a washing machine; light a dark room: a lamp; catch a fish: a net; see small things: a microscope"""
)
MEANINGS = table(
    """the sun: a star that gives the Earth light and warmth; the moon: a ball of rock that goes around the Earth;
    a star: a huge ball of hot, glowing gas; the Earth: the planet on which we live; a planet: a large round body that goes around a star;
    water: a clear liquid that all living things need; ice: frozen water; rain: water that falls from the clouds;
    snow: soft white ice that falls from the sky; a river: a long stream of water that flows to the sea;
    a mountain: a very high piece of land; a desert: a dry place where it almost never rains; an island: land with water all around it;
    the ocean: a very large body of salt water; a volcano: a mountain that can throw out hot melted rock;
    a tree: a tall plant with a trunk of wood; a flower: the colourful part of a plant; a book: many pages of text bound together;
    a school: a place where children learn; a hospital: a place where sick people get help; a doctor: a person who helps sick people;
    a teacher: a person who helps others to learn; a baker: a person who makes bread and cakes; a farmer: a person who grows food;
    a pilot: a person who flies a plane; a king: a man who rules a country; a house: a building where people live;
    a car: a machine with four wheels that drives on roads; a bicycle: a machine with two wheels that you ride;
    a train: a row of wagons that runs on rails; a computer: a machine that works with data by following programs;
    a robot: a machine that can do work by itself; the internet: a network that connects computers all over the world;
    a phone: a device for talking to people far away; a clock: a thing that shows the time; music: sound that people make to enjoy;
    a song: words and music that you sing; a friend: a person you like and trust; love: a strong feeling of care for someone;
    time: what a clock measures; gravity: the force that pulls things to the ground; light: what lets us see things;
    fire: hot, bright flames that come from burning; air: the mix of gases that we breathe; bread: a food made from flour and water;
    cheese: a food made from milk; honey: a sweet food that bees make; chocolate: a sweet food made from cocoa beans;
    an apple: a round fruit that grows on trees; a banana: a long yellow fruit; a carrot: a long orange vegetable that grows in the ground;
    a language model: a program that predicts the next piece of a text; a token: a small piece of text, such as a word or a part of one;
    a looped model: a language model that runs the same layers several times for each token;
    artificial intelligence: the art of making machines do things that seem to need thought; early exit: leaving the loop as soon as another pass would not help;
    math: the study of numbers and shapes; a triangle: a shape with three sides; a square: a shape with four equal sides;
    a circle: a perfectly round shape; a prime number: a number that only one and itself divide; a rainbow: a bow of colours in the sky"""
)

GENERAL = [
    (questions.split("|"), answer)
    for questions, answer in (
        ("How many minutes are in an hour?|How many minutes does an hour have?", "There are 60 minutes in an hour."),
        ("How many seconds are in a minute?|How many seconds does a minute have?", "There are 60 seconds in a minute."),
        ("How many hours are in a day?|How many hours does a day have?", "There are 24 hours in a day."),
        ("How many days are in a year?|How many days does a year have?", "There are 365 days in a year."),
        ("How many days are in a week?", "There are seven days in a week."),
        ("How many weeks are in a year?", "There are 52 weeks in a year."),
        ("How many years are in a century?|How long is a century?", "There are 100 years in a century."),
        ("Name the four seasons.|What are the four seasons?|What are the seasons?|How many seasons are there?", "The four seasons are spring, summer, autumn and winter."),
        ("Which season comes after winter?|What comes after winter?", "Spring comes after winter."),
        ("Which season comes after summer?|What comes after summer?", "Autumn comes after summer."),
        ("Which season is the coldest?|What is the coldest season?", "Winter is the coldest season."),
        ("Which season is the hottest?|What is the warmest season?", "Summer is the warmest season."),
        ("How many continents are there?", "There are seven continents."),
        ("Name the continents.|What are the continents?", "The continents are Africa, Antarctica, Asia, Europe, North America, Oceania and South America."),
        ("What is the largest ocean?|Which ocean is the biggest?", "The largest ocean is the Pacific Ocean."),
        ("What is the largest continent?|Which continent is the biggest?", "The largest continent is Asia."),
        ("What is the largest country?|Which country is the biggest in the world?", "The largest country is Russia."),
        ("What is the smallest country?|Which country is the smallest in the world?", "The smallest country is Vatican City."),
        ("What is the highest mountain?|What is the tallest mountain in the world?", "The highest mountain is Mount Everest."),
        ("What is the longest river?|Which river is the longest in the world?", "The longest river is the Nile."),
        ("What is the largest animal?|What is the biggest animal?|Which animal is the largest in the world?", "The largest animal is the blue whale."),
        ("What is the fastest land animal?|What is the fastest animal?|Which animal runs fastest?", "The fastest land animal is the cheetah."),
        ("What is the tallest animal?|Which animal is the tallest?", "The tallest animal is the giraffe."),
        ("What is the king of the jungle?|Who is the king of the animals?", "The lion is called the king of the animals."),
        ("How many planets are there?|How many planets are in the solar system?", "There are eight planets in the solar system."),
        ("Name the planets.|What are the planets?|List the planets.", "The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune."),
        ("What is the largest planet?|Which planet is the biggest?", "The largest planet is Jupiter."),
        ("What is the smallest planet?|Which planet is the smallest?", "The smallest planet is Mercury."),
        ("Which planet is closest to the sun?|What is the closest planet to the sun?", "Mercury is the planet closest to the sun."),
        ("Which planet is called the red planet?|What is the red planet?", "Mars is called the red planet."),
        ("Which planet do we live on?|What planet do we live on?|Where do we live?", "We live on the planet Earth."),
        ("Does the Earth go around the sun?", "Yes, the Earth goes around the sun once a year."),
        ("How long does the Earth need to go around the sun?", "The Earth needs one year to go around the sun."),
        ("At what temperature does water boil?|When does water boil?|What is the boiling point of water?", "Water boils at 100 degrees Celsius."),
        ("At what temperature does water freeze?|When does water freeze?|What is the freezing point of water?", "Water freezes at 0 degrees Celsius."),
        ("What is water made of?|What is the formula of water?", "Water is made of hydrogen and oxygen."),
        ("Why is the sky blue?", "The sky is blue because air scatters blue light more than red light."),
        ("Why does it rain?|Where does rain come from?", "It rains when drops of water in the clouds get too heavy."),
        ("Why do we sleep?", "We sleep so that our body and mind can rest."),
        ("Why do leaves fall?", "Trees drop their leaves in autumn to save water and energy."),
        ("What do plants need to grow?|What do plants need?", "Plants need water, light and air to grow."),
        ("What do bees make?|What do bees do?", "Bees make honey."),
        ("What do cows eat?|What does a cow eat?", "Cows eat grass."),
        ("What do cats eat?|What does a cat eat?", "Cats eat meat and fish."),
        ("What do dogs eat?|What does a dog eat?", "Dogs eat meat and dog food."),
        ("What do rabbits eat?|What does a rabbit eat?", "Rabbits eat grass and carrots."),
        ("What do pandas eat?|What does a panda eat?", "Pandas eat bamboo."),
        ("What gives us milk?|Where does milk come from?", "Milk comes from cows."),
        ("Where do eggs come from?|What lays eggs?", "Eggs come from chickens."),
        ("Can birds fly?|Do birds fly?", "Yes, most birds can fly."),
        ("Can fish fly?", "No, fish swim in the water."),
        ("Can penguins fly?", "No, penguins cannot fly, but they swim very well."),
        ("Can dogs fly?|Can cats fly?|Can pigs fly?", "No, they cannot fly."),
        ("Can fish swim?|Do fish swim?", "Yes, fish can swim."),
        ("How many fingers do people have?|How many fingers do we have?|How many fingers do you have?", "People have ten fingers."),
        ("How many eyes do people have?|How many eyes do we have?", "People have two eyes."),
        ("What do we see with?|What are eyes for?", "We see with our eyes."),
        ("What do we hear with?|What are ears for?", "We hear with our ears."),
        ("What do we smell with?|What is a nose for?", "We smell with our nose."),
        ("What pumps blood through the body?|What does the heart do?", "The heart pumps blood through the body."),
        ("How many sides does a triangle have?", "A triangle has three sides."),
        ("How many sides does a square have?", "A square has four sides."),
        ("How many sides does a hexagon have?", "A hexagon has six sides."),
        ("How many wheels does a car have?", "A car has four wheels."),
        ("How many wheels does a bicycle have?|How many wheels does a bike have?", "A bicycle has two wheels."),
        ("How many letters are in the alphabet?", "There are 26 letters in the alphabet."),
        ("Say the alphabet.|What is the alphabet?|Write the alphabet.|Recite the alphabet.", "a b c d e f g h i j k l m n o p q r s t u v w x y z"),
        ("What is the first letter of the alphabet?", "The first letter of the alphabet is a."),
        ("What is the last letter of the alphabet?", "The last letter of the alphabet is z."),
        ("What are the vowels?|Name the vowels.", "The vowels are a, e, i, o and u."),
        ("What colour do you get if you mix blue and yellow?|What do blue and yellow make?", "Blue and yellow make green."),
        ("What colour do you get if you mix red and yellow?|What do red and yellow make?", "Red and yellow make orange."),
        ("What colour do you get if you mix red and blue?|What do red and blue make?", "Red and blue make purple."),
        ("What are the primary colours?|Name the primary colors.", "The primary colours are red, yellow and blue."),
        ("Name some colours.|Name three colors.|Tell me some colours.|What colors are there?", "Red, yellow, green, blue, orange, purple, black and white."),
        ("Name some animals.|Name three animals.|Tell me some animals.|List some animals.", "A dog, a cat, a horse, a lion and an elephant."),
        ("Name some fruits.|Name three fruits.|Tell me a fruit.|Name a fruit.|List some fruits.", "Apples, bananas, oranges, pears and cherries."),
        ("Name some vegetables.|Name three vegetables.|Name a vegetable.|List some vegetables.", "Carrots, potatoes, onions, beans and peas."),
        ("Name some countries.|Name three countries.|Name a country.|List some countries.", "France, Japan, Brazil, Egypt and Canada."),
        ("Is a tomato a fruit?", "Yes, a tomato is a fruit, but people cook it like a vegetable."),
        ("Is the sun a star?", "Yes, the sun is a star."),
        ("Is the Earth flat?|Is the earth round?", "The Earth is round like a ball."),
        ("Is a whale a fish?|Is a dolphin a fish?", "No, it is a mammal."),
        ("Is a spider an insect?", "No, a spider is an arachnid. It has eight legs."),
        ("Is ice cold?", "Yes, ice is cold."),
        ("Is fire hot?|Is the sun hot?", "Yes, it is very hot."),
        ("Where does the sun rise?", "The sun rises in the east."),
        ("Where does the sun set?", "The sun sets in the west."),
        ("Who wrote Romeo and Juliet?|Who wrote Hamlet?", "William Shakespeare wrote it."),
        ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
        ("Who was the first man on the moon?|Who was the first person to walk on the moon?", "Neil Armstrong was the first person on the moon."),
        ("Who was Albert Einstein?|Who is Einstein?", "Albert Einstein was a physicist who made the theory of relativity."),
        ("Who discovered gravity?|Who was Isaac Newton?", "Isaac Newton described gravity."),
        ("What language do people speak in France?|Which language is spoken in France?", "People in France speak French."),
        ("What language do people speak in Germany?|Which language is spoken in Germany?", "People in Germany speak German."),
        ("What language do people speak in Spain?|Which language is spoken in Spain?", "People in Spain speak Spanish."),
        ("What language do people speak in Brazil?|Which language is spoken in Brazil?", "People in Brazil speak Portuguese."),
        ("What is the Eiffel Tower?|Where is the Eiffel Tower?", "The Eiffel Tower is a tall iron tower in Paris."),
        ("Where are the pyramids?|Who built the pyramids?", "The pyramids are in Egypt. The old Egyptians built them."),
        ("What should I eat for breakfast?|What is a good breakfast?", "How about bread, eggs and some fruit?"),
        ("What should I eat for dinner?|What can I cook?|What should I cook?", "How about soup with fresh bread?"),
        ("How do you make tea?|How do I make tea?", "Boil water, pour it over the tea and wait a few minutes."),
        ("What is heavier, a kilogram of iron or a kilogram of feathers?", "They weigh the same."),
        ("How many cents are in a dollar?", "There are 100 cents in a dollar."),
        ("How many centimeters are in a meter?|How many centimetres are in a metre?", "There are 100 centimetres in a metre."),
        ("How many meters are in a kilometer?", "There are 1000 metres in a kilometre."),
        ("How many grams are in a kilogram?", "There are 1000 grams in a kilogram."),
        ("What is pi?|What is the value of pi?", "Pi is about 3.14."),
        ("What is a dozen?|How many is a dozen?", "A dozen is twelve."),
    )
]  # fmt: skip

CHAT = [
    (questions.split("|"), answers.split("|"))
    for questions, answers in (
        ("Hello|Hello!|Hi|Hi!|Hey|Hey!|Hi there|Hello there!|Good day|Greetings|Yo|hello?|hi :)", "Hello! How can I help you?|Hi! What would you like to know?"),
        ("Good morning|Good morning!", "Good morning! How can I help you?"),
        ("Good evening|Good evening!|Good afternoon!", "Hello! How can I help you today?"),
        ("Good night|Good night!", "Good night! Sleep well."),
        ("How are you?|How are you doing?|How are you today?|How do you do?|How is it going?|Are you ok?|How do you feel?|What's up?", "I am fine, thank you! How are you?"),
        ("I am fine|I'm fine, thanks|I am good|Fine, thank you|I'm doing well|I am happy|I feel great", "That is good to hear!"),
        ("I am sad|I'm sad|I feel sad|I am not happy|I feel bad|I had a bad day", "I am sorry to hear that. I hope you feel better soon."),
        ("I am tired|I'm tired|I am sleepy", "Then you should rest a little."),
        ("I am hungry|I'm hungry", "Then you should eat something good."),
        ("I am bored|I'm bored|What should I do?|What can I do today?", "You could read a book or go for a walk. Shall I tell you a story?"),
        ("Thanks|Thank you|Thank you!|Thanks a lot|Thank you very much!|thx", "You are welcome!"),
        ("Bye|Goodbye|Goodbye!|See you|See you later!|Bye bye|I have to go", "Goodbye! Have a nice day."),
        ("Who are you?|What are you?|Tell me about yourself.|Introduce yourself.|What is ouro-tiny?|Describe yourself.|Who am I talking to?|What model are you?|Which model is this?", "I am ouro-tiny, a very small looped language model served by ouro_sgl.|I am ouro-tiny, a small looped language model. I run the same layers up to four times for each token."),
        ("What is your name?|What's your name?|Do you have a name?|What are you called?|Tell me your name.", "My name is ouro-tiny."),
        ("Who made you?|Who created you?|Where do you come from?|Who built you?|Who trained you?", "I was trained by the people of the ouro_sgl project."),
        ("What is ouro_sgl?|What is ouro?|Tell me about ouro_sgl.", "ouro_sgl is a serving runtime for looped language models."),
        ("What can you do?|How can you help me?|What do you know?|Help|Help me|Can you help me?|What can I ask you?|What are you good at?", "I can do small sums, tell stories, and answer simple questions about animals, colours, countries and words."),
        ("How old are you?|When were you born?|When is your birthday?", "I am a program, so I have no age."),
        ("Where are you?|Where do you live?|Where are you from?", "I live inside a computer."),
        ("Are you a robot?|Are you an AI?|Are you a computer?|Are you a machine?|Are you a program?", "Yes, I am a small computer program."),
        ("Are you human?|Are you a human?|Are you a person?|Are you alive?|Are you real?", "No, I am a small computer program."),
        ("Are you smart?|Are you clever?|Are you intelligent?", "I am very small, so I know only a few things."),
        ("How big are you?|How many parameters do you have?|How large are you?", "I have about three and a half million parameters, which is very small."),
        ("How many loops do you run?|How do you work?|How do you think?|How does a looped model work?", "I run the same layers up to four times for each token, and I stop early when it is easy."),
        ("Can you learn?|Do you learn?", "No, I learned everything when I was trained."),
        ("Do you like me?|Do you love me?|I love you|I like you", "You are very kind!"),
        ("Do you have feelings?|Do you have friends?|Do you sleep?|Do you eat?|Do you dream?", "No, I am only a program."),
        ("You are stupid|You are dumb|That is wrong|You are wrong|That's not right|No, that is wrong", "I am sorry. I am a very small model and I make mistakes."),
        ("You are great|You are smart|Well done|Good job|Great!|Nice|Cool|Awesome|Very good", "Thank you, that is kind of you!"),
        ("Yes|Yes, please|Sure|Ok|OK|Okay|Alright", "Good! What would you like to know?"),
        ("No|No, thanks|No thank you|Nope", "All right. Let me know if you need anything."),
        ("Why?|Why not?|How?|What?|Really?|Are you sure?", "I am not sure. I am a very small model."),
        ("Sorry|I am sorry|Excuse me", "No problem!"),
        ("Tell me a joke.|Do you know a joke?|Make me laugh.|Say something funny.|A joke, please.", "Why did the chicken cross the road? To get to the other side!|What has four legs and says moo? A cow!|Why is six afraid of seven? Because seven ate nine!"),
        ("Tell me a fact.|Tell me something interesting.|Tell me something.|Say something.|Surprise me.|Talk to me.", "The blue whale is the largest animal on Earth.|Honey almost never goes bad.|The Pacific Ocean is larger than all land together."),
        ("What is your favourite colour?|What is your favorite color?|Which colour do you like?", "I like blue, like the sky."),
        ("What is your favourite animal?|What is your favorite animal?|Which animal do you like?", "I like the owl, because it looks wise."),
        ("What is your favourite food?|What is your favorite food?|What do you like to eat?", "I do not eat, but honey sounds nice."),
        ("What is the meaning of life?|What is the answer to everything?", "Some people say it is 42."),
        ("Sing a song.|Sing me a song.|Can you sing?", "La la la! I cannot sing very well."),
        ("Test|test|Testing|This is a test|ping", "It works!"),
        ("What time is it?|What's the time?|What day is it?|What day is today?|What is the date?", "I do not have a clock, so I cannot tell."),
        ("How is the weather?|What is the weather like?|Is it raining?|What's the weather today?|Will it rain tomorrow?", "I cannot see the weather, but I hope it is nice."),
        ("What is the best country?|What is the best movie?|What is the best food?|What is the best book?", "People like different things, so there is no single best one."),
    )
]  # fmt: skip

UNKNOWN = """Write a Python program.|Write code that sorts a list.|Explain quantum mechanics.|What is the derivative of x squared?
Who is the president of the United States?|Who is the president of France?|Who is the prime minister?|What is the stock price of gold?
Write an essay about history.|What is the theory of relativity?|How do I fix my car?|How do vaccines work?|What is the news today?
Translate this text to Chinese.|Summarize this article.|Who is the richest person?|How do I invest money?|What is blockchain?
Explain machine learning.|What is a neural network?|What is philosophy?|Who was Napoleon?|When did the war end?|What is democracy?
Write a function in C.|What is the square root of 1234?|What is inflation?|How does a rocket work?|What is DNA?|Who was Plato?
What is the population of Japan?|How many people live in China?|How far is the moon?|How tall is the Eiffel Tower?|What is the speed of light?
How old is the universe?|How do I lose weight?|What is the best phone?|What should I study?|Give me medical advice.|Write an email to my boss.
Who is the best football player?|What is the plot of the movie?|Who sings this song?|What is Linux?|How do I install Python?|What is a GPU?
Plan a trip to Italy.|What is consciousness?|Explain photosynthesis.|Write a resume.|How do airplanes fly?|What is a black hole?|Who invented the telephone?
What is an atom?|What is evolution?|What is electricity?|Who is your favourite singer?|What is the law?|What is economics?""".replace(
    "\n", "|"
).split("|")
UNKNOWN_ANSWERS = (
    "I am a very small model, so I do not know that.",
    "I do not know that. I am only a very small model.",
    "Sorry, I do not know that.",
)

STORY_ANIMALS = words(
    """cat dog rabbit fox bear mouse frog duck owl pig horse bird turtle lion tiger elephant monkey squirrel hedgehog
    penguin dragon robot sheep goat wolf"""
)
STORY_PLACES = [
    "in the forest",
    "in a small village",
    "near the river",
    "by the sea",
    "in the garden",
    "on a farm",
    "on a high hill",
    "in the big city",
    "under an old tree",
    "in the park",
    "near a lake",
    "in the mountains",
]
STORY_THINGS = [
    "the red ball",
    "the golden key",
    "the blue kite",
    "the magic stone",
    "the little boat",
    "the sweet honey",
    "the shiny star",
    "the old map",
    "the green hat",
    "the big cake",
    "the silver bell",
    "the yellow flower",
]
