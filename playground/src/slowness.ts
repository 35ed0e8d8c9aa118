/** Which units of the state change slowly. */

/**
 * All units, the slowest first: by Σ (h_t − h_{t−1})² / Σ (h_t − mean)², small for a unit that drifts, near 2 for
 * noise. `states` is (T, units), row by row.
 */
export function slowestFirst(states: Float32Array, units: number): Uint16Array {
  const T = states.length / units;
  const changes = Array.from({ length: units }, (_, u) => {
    let [sum, squares, steps] = [0, 0, 0];
    for (let t = 0; t < T; t++) {
      const value = states[t * units + u];
      sum += value;
      squares += value * value;
      if (t) steps += (value - states[(t - 1) * units + u]) ** 2;
    }
    return steps / Math.max(squares - (sum * sum) / T, 1e-12);
  });
  return Uint16Array.from(changes.keys()).sort((a, b) => changes[a] - changes[b]);
}
