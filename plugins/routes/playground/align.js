// Text and tokens of a stream, brought together: which part of the text each token wrote.
//
// The texts of tokens mostly add up to the text. Where they do not (a character in several tokens, each of which reads
// U+FFFD alone; special tokens, which the text leaves out), the next token that is found sets it right. The text may
// come later than its tokens: a stop string could begin in it.

export class Aligner {
  #text = "";
  #offset = 0;
  #queue = []; // tokens whose text has not come
  #pieces = []; // of tokens that are parts of characters: whether each was accepted

  /** The parts of the text that are known by now, in order: [{text, accepted}]. */
  add(text, tokens) {
    this.#text += text;
    this.#queue.push(...tokens);
    return this.#take(false);
  }

  /** No more will come: all that is left. */
  finish() {
    const parts = this.#take(true);
    this.#emit(parts, this.#text.length, this.#pieces.some(Boolean));
    return parts;
  }

  #take(isOver) {
    const parts = [];
    while (this.#queue.length) {
      const token = this.#queue[0];
      if (token.text.includes("\ufffd")) {
        this.#pieces.push(token.accepted);
      } else if (!this.#takePieces(parts, token.text, isOver) || !this.#takeToken(parts, token, isOver)) {
        break;
      }
      this.#queue.shift();
    }
    return parts;
  }

  /** The characters before this token that several tokens wrote. False: their text has not come. */
  #takePieces(parts, next, isOver) {
    if (!this.#pieces.length) return true;
    const end = this.#offset + 2 * this.#pieces.length + next.length;
    const at = this.#text.slice(this.#offset, end).indexOf(next);
    if (at < 0 && this.#text.length < end && !isOver) return false;
    if (at >= 0) this.#emit(parts, this.#offset + at, this.#pieces.some(Boolean));
    this.#pieces = [];
    return true;
  }

  #takeToken(parts, token, isOver) {
    const rest = this.#text.slice(this.#offset, this.#offset + token.text.length);
    if (rest !== token.text && token.text.startsWith(rest) && !isOver) return false;
    const shown = [token.text, token.text.trimStart()].find((text) => text && this.#text.startsWith(text, this.#offset));
    if (shown) this.#emit(parts, this.#offset + shown.length, token.accepted);
    return true;
  }

  #emit(parts, end, accepted) {
    const text = this.#text.slice(this.#offset, end);
    this.#offset = Math.max(this.#offset, end);
    if (text) parts.push({ text, accepted });
  }
}
