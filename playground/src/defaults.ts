/** What the fields hold at first, and the views that a class may begin with. */

/** The study's prompt. */
export const PROMPT = "ROMEO: ";

/** From The Tempest, act I, scene 2: of the corpus's last tenth, which the models were not trained on. */
export const PASSAGE = `PROSPERO:
Be collected:
No more amazement: tell your piteous heart
There's no harm done.

MIRANDA:
O, woe the day!

PROSPERO:
No harm.
I have done nothing but in care of thee,
Of thee, my dear one, thee, my daughter, who
Art ignorant of what thou art, nought knowing
Of whence I am, nor that I am more better
Than Prospero, master of a full poor cell,
And thy no greater father.

MIRANDA:
More to know
Did never meddle with my thoughts.

PROSPERO:
'Tis time
I should inform thee farther. Lend thy hand,
And pluck my magic garment from me. So:
Lie there, my art. Wipe thou thine eyes; have comfort.
`;

/** Views, as in a URL after "#", and what they show. */
export const LINKS: [string, string][] = [
  ["tour=1", "The guided tour: five questions to predict"],
  ["written=300", "Two texts of 300 characters: on the right, the state is reset before every character"],
  ["every=8&written=300", "The same with a reset every 8 characters: what changes?"],
  ["every=1,150:never&written=350", "A reset before every character, and none after 150: what changes there?"],
  ["panel=surprise&every=32", "What each character of a text costs, and what a reset every 32 characters adds to it"],
  ["panel=inside", "One number of the state over a text, and one step of the cell"],
];
