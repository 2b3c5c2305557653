/* cos and sin of integer positions. exp(i m theta) is a product over the base-256 digits of m. The tables of the three
   digits are arguments. Positions beyond them use cos and sin of libm. */
#ifndef ROPEWALK_ANGLES_H
#define ROPEWALK_ANGLES_H

#include <math.h>

#include "tensors.h"

enum { REACH = 1 << 24 };

/* From positions [batch, seq] to cos and sin [batch, heads, seq, pairs], with tables [3, 256, heads, pairs] of
   (cos, sin). */
typedef struct {
    const void *positions;
    int64_t batch_step, seq_step;
    int wide;
    const AnyDouble *tables, *inv_freq;
    double amplitude;
    AnyFloat *cos, *sin;
    int64_t batch, heads, seq, pairs;
} Angles;

static void angles_row(const Angles *a, int64_t position, int64_t head, AnyFloat *cosines,
                       AnyFloat *sines) {
    const int64_t pairs = a->pairs, width = 2 * a->heads * pairs;
    const double amplitude = a->amplitude, signed_amplitude = position < 0 ? -amplitude : amplitude;
    if (position <= -REACH || position >= REACH) {
        const AnyDouble *theta = a->inv_freq + head * pairs;
        for (int64_t i = 0; i < pairs; i++) {
            const double angle = (double)position * theta[i];
            cosines[i] = (float)(amplitude * cos(angle)), sines[i] = (float)(amplitude * sin(angle));
        }
        return;
    }
    const int64_t size = position < 0 ? -position : position;
    const AnyDouble *low = a->tables + (size & 255) * width + 2 * head * pairs;
    const AnyDouble *middle = a->tables + (256 + ((size >> 8) & 255)) * width + 2 * head * pairs;
    const AnyDouble *high = a->tables + (512 + (size >> 16)) * width + 2 * head * pairs;
    for (int64_t i = 0; i < 2 * pairs; i += 2) {
        const double c = low[i] * middle[i] - low[i + 1] * middle[i + 1];
        const double s = low[i] * middle[i + 1] + low[i + 1] * middle[i];
        cosines[i / 2] = (float)(amplitude * (c * high[i] - s * high[i + 1]));
        sines[i / 2] = (float)(signed_amplitude * (c * high[i + 1] + s * high[i]));
    }
}

static int64_t position_of(const Angles *a, int64_t row) {
    const int64_t at = row / a->seq * a->batch_step + row % a->seq * a->seq_step;
    return a->wide ? ((const AnyLong *)a->positions)[at] : ((const AnyInt *)a->positions)[at];
}

static void angles_part(const void *job, int64_t part, int64_t parts) {
    const Angles *a = job;
    const int64_t rows = a->batch * a->seq, stop = rows * (part + 1) / parts;
    for (int64_t row = rows * part / parts; row < stop; row++) {
        const int64_t batch = row / a->seq, token = row % a->seq, position = position_of(a, row);
        for (int64_t head = 0; head < a->heads; head++) {
            const int64_t to = ((batch * a->heads + head) * a->seq + token) * a->pairs;
            angles_row(a, position, head, a->cos + to, a->sin + to);
        }
    }
}

#endif
