import preact from "@preact/preset-vite";
import { defineConfig } from "vitest/config";

export default defineConfig({
  base: "./", // opens from any folder of any file server
  plugins: [preact()],
  server: { fs: { allow: [".."] } }, // the models are those that ship with the Python package
  worker: {
    format: "es",
    rolldownOptions: { output: { assetFileNames: "weights/[name][extname]" } }, // where `jaxgru playground` serves them
  },
  build: {
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
    assetsInlineLimit: 0,
    license: { fileName: "licenses.md" }, // of the page's libraries; those of the worker's stay in its code
  },
  test: { include: ["src/**/*.test.ts"] },
});
