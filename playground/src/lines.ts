/** Where the lines of a text break. */

/** Break a text into lines of so many columns, after spaces where possible; return where each begins. */
export function breakLines(characters: string[], columns: number): number[] {
  const starts = [0];
  let space = 0; // where a line may begin: after the last space
  characters.forEach((character, i) => {
    const start = starts[starts.length - 1];
    if (i - start >= columns && character !== " " && character !== "\n") {
      starts.push(space > start ? space : i);
    }
    if (character === " ") space = i + 1;
    if (character === "\n" && i + 1 < characters.length) starts.push(i + 1);
  });
  return starts;
}
