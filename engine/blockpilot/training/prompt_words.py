"""Word lists of the prompt generator, written for this project."""

from __future__ import annotations

# fmt: off
NAMES = (
    "Amara", "Anton", "Beatriz", "Bilal", "Carmen", "Chidi", "Dalia", "Daniel", "Elif", "Emil", "Farah",
    "Felix", "Greta", "Hassan", "Hana", "Igor", "Ines", "Jamal", "Jonas", "Kaito", "Katya", "Lars", "Leila",
    "Malik", "Marta", "Mei", "Nadia", "Nico", "Olga", "Omar", "Petra", "Priya", "Quentin", "Rania", "Rosa",
    "Sami", "Sofia", "Tariq", "Tessa", "Umar", "Vera", "Viktor", "Wanda", "Xavier", "Yara", "Yusuf", "Zora",
    "Zeno",
)
TOWNS = (
    "Almeda", "Brackwater", "Cedar Point", "Dunmore", "Eastvale", "Ferrow", "Glenhaven", "Hollybrook",
    "Ironbridge", "Juniper Falls", "Kestrel Bay", "Larkfield", "Millstone", "Northgate", "Oakhollow",
    "Pinecrest", "Quarry Hill", "Ravensford", "Saltmarsh", "Thornbury",
)
THINGS = (
    "pencils", "apples", "stickers", "marbles", "seedlings", "postcards", "candles", "bricks", "cookies",
    "bottles", "tickets", "notebooks", "buttons", "lemons", "batteries", "tiles", "balloons", "coins",
    "shells", "ribbons", "magnets", "stamps", "muffins", "ropes", "lanterns", "carrots",
)
CONTAINERS = (
    "boxes", "bags", "crates", "baskets", "jars", "trays", "drawers", "shelves", "buckets", "envelopes",
)
TOPICS = (
    "photosynthesis", "compound interest", "how vaccines work", "plate tectonics", "recursion in programming",
    "the water cycle", "supply and demand", "how batteries store energy", "the phases of the moon",
    "why the sky is blue", "how a search engine works", "natural selection", "the greenhouse effect",
    "binary numbers", "how bread rises", "black holes", "the immune system", "inflation", "how airplanes fly",
    "the difference between weather and climate", "public-key encryption", "DNA", "erosion",
    "how a bill becomes law", "sound waves", "the food chain", "machine learning", "how rainbows form",
    "magnetism", "the stock market", "volcanoes", "sleep cycles", "how a refrigerator keeps food cold",
    "gravity", "the scientific method", "fermentation", "how GPS finds your position", "friction",
    "the nitrogen cycle", "how earthquakes are measured", "democracy", "hash tables", "tides", "solar panels",
    "how memory works in the brain", "composting", "the speed of light", "version control",
    "how muscles grow", "internet routing", "crop rotation", "diffusion", "probability",
    "how mirrors reflect light", "antibiotics", "the carbon cycle", "sorting algorithms",
    "how elevators work",
)
AUDIENCES = (
    "a ten-year-old", "a high school student", "a new employee", "a curious grandparent", "a farmer",
    "a first-year university student", "someone who has never studied science", "a busy manager",
    "a class of beginners", "a tourist", "a nurse", "a journalist",
)
TERMS = (
    "algorithm", "altruism", "biodiversity", "budget", "catalyst", "coalition", "currency", "deforestation",
    "dialect", "ecosystem", "empathy", "entropy", "fossil", "freight", "gravity well", "habitat",
    "hypothesis", "immunity", "inertia", "irony", "isotope", "ledger", "metaphor", "migration", "mortgage",
    "nutrient", "orbit", "parasite", "peninsula", "pollination", "prototype", "quorum", "resilience",
    "satellite", "sediment", "statute", "symmetry", "tariff", "thesis", "turbine", "vaccine", "vertebrate",
    "warranty", "watershed", "yield", "zoning", "bandwidth", "cache", "compiler", "latency",
)
ANIMALS = (
    "otter", "fox", "heron", "badger", "tortoise", "owl", "crab", "hedgehog", "goat", "whale", "sparrow",
    "lynx", "beetle", "seal", "donkey", "crane",
)
FOODS = (
    "lentil soup", "vegetable lasagna", "banana bread", "chickpea curry", "apple pie", "mushroom risotto",
    "potato salad", "pumpkin soup", "fried rice", "oatmeal pancakes", "tomato pasta", "bean chili",
    "carrot cake", "spinach omelette", "rice pudding", "cucumber salad",
)
JOBS = (
    "baker", "electrician", "librarian", "beekeeper", "surveyor", "nurse", "carpenter", "bus driver",
    "gardener", "translator", "welder", "pharmacist", "photographer", "plumber", "teacher", "tailor",
    "accountant", "lighthouse keeper", "veterinarian", "chef",
)
HOBBIES = (
    "growing tomatoes on a balcony", "bird watching", "learning the guitar", "long-distance cycling",
    "baking sourdough", "chess", "watercolour painting", "trail running", "knitting", "photography at night",
    "model trains", "keeping an aquarium", "woodcarving", "writing a diary", "swimming in cold water",
    "collecting minerals", "juggling", "learning a new language",
)
LANGUAGES = (
    "French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Swedish", "Polish",
)
PRODUCTS = (
    "electric kettle", "desk lamp", "hiking backpack", "wireless keyboard", "coffee grinder", "rain jacket",
    "folding chair", "water bottle", "bicycle pump", "office chair", "headlamp", "cast-iron pan",
    "alarm clock", "tent", "vacuum cleaner", "garden hose",
)
PROJECTS = (
    "a new footbridge over the river", "a community garden behind the school", "a public library branch",
    "a bicycle lane on the main road", "a repaired clock tower", "a skate park",
    "a solar roof for the swimming hall", "a night bus line", "a covered market", "a flood wall",
    "a playground made of recycled wood", "a small museum about fishing", "an animal shelter",
    "a drinking fountain in every square",
)
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)
WEEKDAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)
COLOURS = (
    "red", "blue", "green", "yellow", "purple", "orange", "white", "black", "grey", "brown",
)
OBJECTS = (
    "a brass key", "an old radio", "a broken umbrella", "a paper map", "a silver whistle", "a lost suitcase",
    "a wooden boat", "a jar of honey", "a letter without a stamp", "a painted stone", "a pocket watch",
    "a torn photograph", "a tin drum", "a glass marble",
)
COMPARED = (
    "cats and dogs as pets", "trains and buses", "paper books and e-readers", "renting and buying a home",
    "tea and coffee", "lists and tuples in Python", "cities and villages", "running and swimming",
    "wind power and solar power", "lakes and rivers", "laptops and desktop computers",
    "working at home and working in an office", "alligators and crocodiles", "butter and olive oil",
    "cash and bank cards", "novels and short stories", "mountains and beaches for a holiday",
    "stacks and queues", "cotton and wool", "debit and credit", "fruit juice and whole fruit",
    "comets and asteroids", "public and private schools", "email and phone calls", "sandals and boots",
    "interpreted and compiled languages",
)
