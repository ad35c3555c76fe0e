/* All sums of rows of fp32 values in one pass over the memory; see digest.py, which defines them.

Vectors are an extension of GCC and Clang, for any processor: they keep sums in registers. */

#include <stdint.h>
#include <string.h>

#ifdef __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { GROUP = 127, PLACES = 128, VECTORS = PLACES / LANES };
enum { GROUPS_AT_ONCE = 16, AT_ONCE = GROUPS_AT_ONCE * GROUP };
enum { SKETCHES = 16, PARTS = SKETCHES / LANES, SUM = SKETCHES, SQUARES, SUMS };

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint64_t Words __attribute__((vector_size(4 * LANES)));

static inline Bits larger(Bits a, Bits b)
{
    const Bits above = a > b;
    return (a & above) | (b & ~above);
}

static inline float total(Floats of)
{
    float part[LANES];
    memcpy(part, &of, sizeof part);
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            part[k] += part[k + half];
    return part[0];
}

/* Adds groups of columns to the sums of their row, at most GROUPS_AT_ONCE; returns the bits of the
largest magnitude, which are in the order of magnitudes, NaN above all. */
static int32_t add_groups(const float *x, int64_t groups, const float *signs, const Floats *places,
                          double *sums)
{
    const Bits magnitude = (Bits){0} + 0x7fffffff;
    Floats folded[VECTORS], sum[2] = {{0}}, squares[2] = {{0}};
    Bits largest[2] = {{0}};
    for (int vector = 0; vector < VECTORS; vector += 2) {
        Floats own[2] = {{0}};
        Bits mask = (Bits){0} - 1;
        if (vector == VECTORS - 2)
            mask[LANES - 1] = 0; /* of the next group */
        for (int64_t group = 0; group < groups; group++)
            for (int k = 0; k < 2; k++) { /* one does not wait for the other */
                Bits bits;
                memcpy(&bits, x + group * GROUP + (vector + k) * LANES, sizeof bits);
                if (k)
                    bits &= mask;
                const Floats value = (Floats)bits;
                own[k] += signs[group] * value;
                sum[k] += value;
                squares[k] += value * value;
                largest[k] = larger(bits & magnitude, largest[k]);
            }
        folded[vector] = own[0], folded[vector + 1] = own[1];
    }
    for (int part = 0; part < PARTS; part++) {
        Floats sketch[4] = {{0}};
        for (int place = 0; place < PLACES; place += 4)
            for (int k = 0; k < 4; k++)
                sketch[k] += ((const float *)folded)[place + k] * places[(place + k) * PARTS + part];
        sketch[0] = (sketch[0] + sketch[1]) + (sketch[2] + sketch[3]);
        for (int k = 0; k < LANES; k++)
            sums[part * LANES + k] += sketch[0][k];
    }
    sums[SUM] += total(sum[0] + sum[1]);
    sums[SQUARES] += total(squares[0] + squares[1]);
    int32_t most = 0;
    largest[0] = larger(largest[0], largest[1]);
    for (int k = 0; k < LANES; k++)
        most = largest[0][k] > most ? largest[0][k] : most;
    return most;
}

/* Sums of each row: of products with the signs of its columns, of values, of squares.

x        [rows, columns], stride: from a row to the next
first    place of the first column in its group
signs    of the groups that the columns are of
places   [128, 16] signs of the places in a group, whose last is of no column
sums     [rows, 18]
largest  [rows] magnitude; NaN if there is one */
void sum_rows(const float *x, int64_t rows, int64_t columns, int64_t stride, int64_t first,
              const float *signs, const float *places, double *sums, float *largest)
{
    Floats of_places[PLACES * PARTS];
    memcpy(of_places, places, sizeof of_places);
    for (int64_t i = 0; i < rows; i++, x += stride, sums += SUMS, largest++) {
        const float *group = signs;
        int64_t place = first;
        int32_t most = 0;
        memset(sums, 0, SUMS * sizeof *sums);
        for (int64_t begin = 0; begin < columns; place = 0) {
            float cached[AT_ONCE + 1]; /* read in the order of memory, whole groups */
            const int64_t left = columns - begin, room = AT_ONCE - place;
            const int64_t count = left < room ? left : room;
            const int64_t groups = (place + count + GROUP - 1) / GROUP;
            memset(cached, 0, place * sizeof *x);
            memcpy(cached + place, x + begin, count * sizeof *x);
            memset(cached + place + count, 0, (groups * GROUP + 1 - place - count) * sizeof *x);
            const int32_t own = add_groups(cached, groups, group, of_places, sums);
            most = own > most ? own : most;
            begin += count, group += groups;
        }
        memcpy(largest, &most, sizeof most);
    }
}

static inline Words products(const float *x, const uint64_t *factors)
{
    const Bits negative_zero = (Bits){0} + INT32_MIN;
    Bits bits;
    Words own;
    memcpy(&bits, x, sizeof bits);
    memcpy(&own, factors, sizeof own);
    return (Words)(bits & ~(bits == negative_zero)) * own; /* -0 counts as +0 */
}

/* Of each row: the sum of pairs of values, as words of 64 bits, times factors [columns / 2]. */
void exact_rows(const float *x, int64_t rows, int64_t columns, int64_t stride,
                const uint64_t *factors, uint64_t *sums)
{
    const int64_t whole = columns / LANES * LANES, rest = (columns - whole) * sizeof *x;
    uint64_t last_factors[LANES / 2] = {0};
    memcpy(last_factors, factors + whole / 2, rest);
    for (int64_t i = 0; i < rows; i++, x += stride) {
        float last[LANES] = {0};
        memcpy(last, x + whole, rest);
        Words sum = products(last, last_factors);
        for (int64_t j = 0; j < whole; j += LANES)
            sum += products(x + j, factors + j / 2);
        sums[i] = 0;
        for (int k = 0; k < LANES / 2; k++)
            sums[i] += sum[k];
    }
}
