/** The memory curve: mean nats per character against how often the state is reset. */

import { RESETS, type Reset } from "./view";

interface Props {
  means: Map<Reset, number>;
  /** Of a table of letter pairs. */
  bigram: number | null;
  selected: Reset;
  /** A point was clicked. The keyboard moves the slider instead. */
  onSelect(reset: Reset): void;
}

const [WIDTH, HEIGHT] = [640, 360];
const [LEFT, RIGHT, TOP, BOTTOM] = [56, 16, 44, 64];

/** Steps between the labels of the vertical axis, from the span of the values. */
const step = (span: number) => [0.1, 0.2, 0.5, 1, 2].find((size) => span / size <= 6) ?? 5;

export function MemoryCurve({ means, bigram, selected, onSelect }: Props) {
  const values = [...means.values(), ...(bigram === null ? [] : [bigram])];
  if (!values.length) return null;
  const size = step(Math.max(...values) - Math.min(...values));
  const low = size * Math.floor(Math.min(...values) / size - 0.4);
  const high = size * Math.ceil(Math.max(...values) / size + 0.2);
  const x = (reset: Reset) => LEFT + 20 + (RESETS.indexOf(reset) * (WIDTH - LEFT - RIGHT - 40)) / (RESETS.length - 1);
  const y = (nats: number) => TOP + ((high - nats) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const ticks = Array.from({ length: Math.round((high - low) / size) + 1 }, (_, i) => low + i * size);
  const known = RESETS.filter((reset) => means.has(reset)).map((reset) => [reset, means.get(reset)!] as const);
  const name = (reset: Reset) => (reset === null ? "never" : String(reset));
  const summary =
    "Mean nats per character, by how many characters lie between two resets: " +
    known.map(([reset, nats]) => `${name(reset)}: ${nats.toFixed(2)}`).join(", ") +
    (bigram === null ? "." : `; a table of letter pairs: ${bigram.toFixed(2)}.`);
  return (
    <svg class="curve" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={summary}>
      {ticks.map((nats) => (
        <g class="tick">
          <line x1={LEFT} x2={WIDTH - RIGHT} y1={y(nats)} y2={y(nats)} />
          <text x={LEFT - 8} y={y(nats) + 4} text-anchor="end">{nats.toFixed(size < 1 ? 1 : 0)}</text>
        </g>
      ))}
      {RESETS.map((reset) => (
        <text class="tick" x={x(reset)} y={HEIGHT - BOTTOM + 22} text-anchor="middle">{name(reset)}</text>
      ))}
      <text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 8} text-anchor="middle">
        reset the state every so many characters
      </text>
      <text x={0} y={20}>nats per character</text>
      {bigram !== null && (
        <g class="bigram">
          <line x1={LEFT} x2={WIDTH - RIGHT} y1={y(bigram)} y2={y(bigram)} />
          <text x={WIDTH - RIGHT} y={y(bigram) - 6} text-anchor="end">
            a table of letter pairs: {bigram.toFixed(2)}
          </text>
        </g>
      )}
      <polyline points={known.map(([reset, nats]) => `${x(reset)},${y(nats)}`).join(" ")} />
      {known.map(([reset, nats]) => (
        <g class={reset === selected ? "point selected" : "point"} onClick={() => onSelect(reset)}>
          <circle cx={x(reset)} cy={y(nats)} r={reset === selected ? 7 : 4} />
          <text x={x(reset)} y={y(nats) + 22} text-anchor="middle">{nats.toFixed(2)}</text>
          <circle class="target" cx={x(reset)} cy={y(nats)} r={24} />
        </g>
      ))}
    </svg>
  );
}
