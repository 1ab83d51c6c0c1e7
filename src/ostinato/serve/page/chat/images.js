// Pictures that go with a question: taken from files, what is pasted and what is dropped; shown on canvases.

import { button, make, tell } from "../dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const ADDRESS = /^data:(image\/(?:png|jpeg|webp|gif));base64,([A-Za-z0-9+/]+=*)$/;
const LARGEST = 20_000_000; // bytes of one file
const SHOWN = 480; // pixels of the longer side

/** Whether a text is a picture as a data URL, and nothing else. */
export const isPicture = (text) => typeof text === "string" && ADDRESS.test(text);

function blobOf(address) {
  const [, type, content] = ADDRESS.exec(address);
  return new Blob([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], { type });
}

/** A canvas with the picture: the page's policy lets no picture be loaded from elsewhere than the server. */
export function pictureOf(address, label) {
  const canvas = make("canvas", { className: "picture", width: 1, height: 1, role: "img", ariaLabel: label });
  const failed = () => canvas.replaceWith(make("p", { className: "note" }, "this picture cannot be shown"));
  (async () => {
    const bitmap = await createImageBitmap(blobOf(address));
    const scale = Math.min(1, SHOWN / Math.max(bitmap.width, bitmap.height));
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    canvas.dataset.drawn = "true";
  })().catch(failed);
  return canvas;
}

function addressOf(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** The pictures of the next question, in a row that shows them. */
export class Pictures {
  constructor(row, onChange) {
    this.row = row;
    this.onChange = onChange;
    this.addresses = [];
  }

  async add(blobs) {
    for (const blob of blobs) {
      if (!KINDS.includes(blob.type)) tell(`${blob.name || "This file"} is not a picture that the model takes: PNG, JPEG, WebP or GIF.`);
      else if (blob.size > LARGEST) tell(`${blob.name || "This picture"} has more than ${LARGEST / 1e6} MB.`);
      else this.addresses.push(await addressOf(blob));
    }
    this.show();
  }

  /** Hands the pictures over; none are left. */
  take() {
    const taken = this.addresses;
    this.set([]);
    return taken;
  }

  set(addresses) {
    this.addresses = [...addresses];
    this.show();
  }

  show() {
    this.row.hidden = !this.addresses.length;
    this.row.replaceChildren(
      ...this.addresses.map((address, index) => {
        const remove = button("×", () => this.set(this.addresses.filter((_, each) => each !== index)), {
          className: "remove", ariaLabel: `Take picture ${index + 1} away`,
        });
        return make("li", {}, pictureOf(address, `Picture ${index + 1} of the next question`), remove);
      }),
    );
    this.onChange();
  }
}

/** The files among what was dropped or pasted. */
export const filesOf = (transfer) => [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
