"""Text of the demo, written for it: to train on, to measure on, and who did what to whom."""

from typing import NamedTuple

# Beside those of `tisa.hf.default_text`: kernels are fitted and distilled on these.
TRAINING = (
    "The baker opens at five, long before anyone else in the street is awake.",
    "I have lost my umbrella twice this year.",
    "Her grandmother taught her how to mend a net.",
    "The lake freezes in December and thaws in April.",
    "Do not touch the wire until the light has gone out.",
    "They moved the piano upstairs with the help of four friends.",
    "A letter arrived for the man who used to live here.",
    "The second key opens the cellar, the first one the garden gate.",
    "Because the road was closed, we took the ferry.",
    "He reads the newspaper from the last page to the first.",
    "How many apples are left in the basket?",
    "The engineers found the fault after searching for nine days.",
    "Nothing was stolen, but every drawer had been opened.",
    "Yesterday the shop sold more bread than in the whole week before.",
    "The film begins where the book ends.",
    "She gave her brother the map and kept the compass.",
    "Her brother gave the map back and asked for the compass.",
    "The tall tree behind the church was planted by a schoolboy.",
    "If it snows tonight, the school will be closed tomorrow.",
    "The bus that goes to the airport leaves from the other side of the square.",
    "No one in the village remembers who built the well.",
    "The painter mixed blue with yellow until he had the green of the sea.",
    "We need two more chairs and a longer table.",
    "The mayor thanked the firemen for their work during the flood.",
    "A spoonful of honey in hot milk helps against a cough.",
    "The ship left the harbour at noon and was out of sight by three.",
    "Have you ever seen a comet with the naked eye?",
    "The judge did not believe the witness, and the witness did not believe the judge.",
    "Its engine is old, its brakes are new, and its paint is older than both.",
    "The first snow fell on the day after the harvest.",
    "Some birds sleep while they fly over the ocean.",
    "The carpenter measured twice and cut once.",
    "My uncle, who hates cheese, works in a dairy.",
    "The signal reached the station three minutes after it had been sent.",
    "On the left you see the old town hall, on the right the new library.",
    "The doctor told the nurse that the patient had slept well.",
    "The nurse told the doctor that the patient had not slept at all.",
    "Every summer the river carries sand from the mountains to the coast.",
    "The boy hid the present under his sister's bed.",
    "There were more questions than answers at the end of the meeting.",
    "She wrote the last chapter first.",
    "The bridge is safe for people but not for lorries.",
    "They agreed on the price but not on the date.",
    "Wolves have returned to the forests in the east of the country.",
    "The teacher who had broken the window blamed the wind.",
    "A good map shows what is there and leaves out what is not needed.",
    "The tickets are cheaper on Tuesdays than at the weekend.",
    "In the old days, salt was worth as much as silver.",
    "The guide walked in front, the children behind her, and the dog last of all.",
    "Could you turn the music down a little?",
    "The storm took the roof of the barn and put it down in the next field.",
    "The chess player lost her queen and won the game.",
    "Before you open the box, read the note on the lid.",
    "He has been learning the violin for a year, and his neighbours know it.",
    "The north wind brings rain here, while the south wind brings dust.",
    "Few people know that the clock in the tower runs backwards.",
    "The cook tasted the soup, shook his head, and added more pepper.",
    "What the company earned in spring it lost in autumn.",
    "The lighthouse keeper had not spoken to anyone since March.",
    "A cup of coffee costs more in the station than in the town.",
)

# Never trained on.
HELD_OUT = (
    "The farmer sold two cows and bought a tractor.",
    "A strange noise came from the engine, and then it stopped.",
    "The pilot apologised for the delay and blamed the fog.",
    "The queen visited the hospital that her father had opened.",
    "Nobody noticed that the painting was hanging upside down.",
    "My friend who lives in Norway sends me a card every winter.",
    "The shop on the corner sells bread, newspapers and stamps.",
    "The ice on the pond was too thin to stand on.",
    "After dinner they played cards until the candles went out.",
    "The thief came in through the kitchen and left through the front door.",
    "This machine folds paper faster than any person can.",
    "The coach told the players to rest before the final.",
    "The children built a dam across the stream.",
    "It is easier to climb this hill than to come down again.",
    "The old bridge was closed after the flood in January.",
    "Her answer was short, clear and wrong.",
    "Two of the five climbers reached the top before dark.",
    "The gardener watered the roses and forgot the beans.",
    "The price of oil rose, and the price of bread followed.",
    "He forgot the name of the street but not the number of the house.",
    "The scientists measured the depth of the lake with sound.",
    "The tailor made the coat from a blanket.",
    "Many of the letters were never opened by the person they were sent to.",
    "The train to the coast leaves every hour from platform nine.",
    "She bought a house in the town where she was born.",
    "The bird that sings at night is smaller than a mouse.",
    "The museum shows the tools that the first settlers brought with them.",
    "When the bell rang, the pupils ran out and the teacher sat down.",
    "The sailor tied the rope to the mast before the wind turned.",
    "The soup was cold, the bread was hard, and the bill was wrong.",
    "You can see the island from here only on a clear morning.",
    "The fire began in the cellar and spread to the roof.",
    "The student asked a question that the professor could not answer.",
    "The moon is smaller than the earth and has no air.",
    "He carried the heavy box up the stairs and the empty one down.",
    "The mountain village has one road, one shop and three churches.",
    "The army crossed the river in the night and reached the city at dawn.",
    "A new law forbids the sale of fireworks to children.",
    "The orchestra played the slow movement faster than the fast one.",
    "I would rather walk in the rain than wait for the bus.",
)


class Deed(NamedTuple):
    """Who did what to whom; either of the two could have done it."""

    agent: str
    did: str
    done: str
    patient: str

    def active(self) -> str:
        """Return the sentence that tells it."""
        return f"The {self.agent} {self.did} the {self.patient}."

    def passive(self) -> str:
        """Return the same said the other way round, in nearly the same words."""
        return f"The {self.patient} was {self.done} by the {self.agent}."

    def exchanged(self) -> "Deed":
        """Return the same deed, done by the other."""
        return Deed(self.patient, self.did, self.done, self.agent)


DEEDS = (
    Deed("dog", "bit", "bitten", "man"),
    Deed("cat", "chased", "chased", "mouse"),
    Deed("teacher", "praised", "praised", "student"),
    Deed("police officer", "arrested", "arrested", "thief"),
    Deed("lion", "killed", "killed", "hunter"),
    Deed("king", "betrayed", "betrayed", "queen"),
    Deed("doctor", "cured", "cured", "nurse"),
    Deed("boy", "kissed", "kissed", "girl"),
    Deed("company", "sued", "sued", "customer"),
    Deed("army", "attacked", "attacked", "city"),
    Deed("mother", "called", "called", "son"),
    Deed("lawyer", "paid", "paid", "client"),
    Deed("wolf", "followed", "followed", "bear"),
    Deed("painter", "admired", "admired", "poet"),
    Deed("driver", "hit", "hit", "cyclist"),
    Deed("winner", "thanked", "thanked", "loser"),
    Deed("robot", "built", "built", "engineer"),
    Deed("bank", "bought", "bought", "airline"),
    Deed("shark", "ate", "eaten", "seal"),
    Deed("president", "fired", "fired", "minister"),
    Deed("singer", "hired", "hired", "pianist"),
    Deed("witness", "accused", "accused", "neighbour"),
    Deed("horse", "kicked", "kicked", "farmer"),
    Deed("guard", "saved", "saved", "prisoner"),
)
