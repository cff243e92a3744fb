// Does with kafkajs what applications do, one scenario a run, and fails with a reason.
//
//   node main.js SCENARIO BOOTSTRAP NAME
//
// NAME is for topics, groups and transactional ids; nobody else may use it. The packages are found by NODE_PATH.
'use strict'

const assert = require('node:assert/strict')
const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require('kafkajs')
const lz4 = require('lz4js')
const snappy = require('kafkajs-snappy')
const zstd = require('@bokuweb/zstd-wasm')

const PATIENCE_MS = 30_000
const PARTITIONS = 6
const LARGE_BYTES = 2_000_000
const MANY = 200

CompressionCodecs[CompressionTypes.Snappy] = snappy
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async encoder => Buffer.from(lz4.compress(encoder.buffer)),
  decompress: async buffer => Buffer.from(lz4.decompress(buffer)),
})
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async encoder => Buffer.from(zstd.compress(encoder.buffer, 3)),
  decompress: async buffer => Buffer.from(zstd.decompress(buffer)),
})

const [scenario, bootstrap, name] = process.argv.slice(2)
const kafka = new Kafka({ clientId: 'semel-test', brokers: [bootstrap], logLevel: logLevel.NOTHING, retry: { retries: 8 } })
const admin = kafka.admin()
const open = [admin]

function sleep(ms) {
  return new Promise(resolve => setTimeout(resolve, ms))
}

async function until(what, holds) {
  const deadline = Date.now() + PATIENCE_MS
  while (!holds()) {
    assert(Date.now() < deadline, `${what}: not within ${PATIENCE_MS} ms`)
    await sleep(20)
  }
}

async function create(topic, numPartitions, configEntries = []) {
  await admin.createTopics({ topics: [{ topic, numPartitions, replicationFactor: 1, configEntries }] })
}

async function producerOf(options = {}) {
  const producer = kafka.producer({ allowAutoTopicCreation: false, ...options })
  await producer.connect()
  open.push(producer)
  return producer
}

// A member of a group that remembers all it got.
async function member(groupId, topic, fromBeginning = true) {
  const consumer = kafka.consumer({
    groupId, sessionTimeout: 6_000, heartbeatInterval: 100, rebalanceTimeout: 6_000, maxWaitTimeInMs: 50,
    maxBytesPerPartition: 4_000_000,
  })
  const self = { consumer, messages: [], share: [], closed: false }
  consumer.on(consumer.events.GROUP_JOIN, event => {
    self.share = event.payload.memberAssignment[topic] || []
  })
  await consumer.connect()
  open.push(consumer)
  await consumer.subscribe({ topic, fromBeginning })
  await consumer.run({
    autoCommit: true,
    eachMessage: async ({ partition, message }) => {
      self.messages.push({ partition, ...message })
    },
  })
  return self
}

async function read(topic, count, groupId = `${topic}-reader`) {
  const reader = await member(groupId, topic)
  await until(`${count} messages are read`, () => reader.messages.length >= count)
  await reader.consumer.disconnect()
  assert.equal(reader.messages.length, count)
  return reader.messages
}

const scenarios = {
  async codecs() {
    await zstd.init()
    await create(name, 1)
    const producer = await producerOf({ idempotent: true })
    for (const compression of Object.values(CompressionTypes)) {
      const messages = Array.from({ length: 50 }, (_, i) => ({ key: `${compression}`, value: 'x'.repeat(100) + i }))
      await producer.send({ topic: name, compression, messages })
    }
    const found = await read(name, 250)
    for (const compression of Object.values(CompressionTypes)) {
      const values = found.filter(each => each.key.toString() === `${compression}`).map(each => each.value.toString())
      assert.deepEqual(values, Array.from({ length: 50 }, (_, i) => 'x'.repeat(100) + i))
    }
  },

  async records() {
    await create(name, 1)
    assert.deepEqual((await admin.fetchTopicOffsets(name)).map(each => each.offset), ['0'])
    const producer = await producerOf()
    await producer.send({
      topic: name,
      messages: [
        { key: null, value: 'no key' },
        { key: 'no value', value: null },
        { key: '', value: '' },
        { key: 'headers', value: 'v', headers: { a: ['1', '2'], '→': 'ü' } },
      ],
    })
    const found = await read(name, 4)
    assert.equal(found[0].key, null)
    assert.equal(found[1].value, null)
    assert.equal(found[2].value.length, 0)
    assert.deepEqual(found[3].headers.a.map(String), ['1', '2'])
    assert.equal(found[3].headers['→'].toString(), 'ü')
  },

  async large() {
    await create(name, 1, [{ name: 'max.message.bytes', value: '3000000' }])
    const value = Buffer.alloc(LARGE_BYTES, 'abcdefg')
    const producer = await producerOf()
    await producer.send({ topic: name, messages: [{ value }] })
    const [found] = await read(name, 1)
    assert(found.value.equals(value), '2 MB came back changed')
  },

  async group() {
    await create(name, PARTITIONS)
    const members = []
    const share = (...sharing) => () =>
      sharing.every(each => each.share.length === PARTITIONS / sharing.length) &&
      new Set(sharing.flatMap(each => each.share)).size === PARTITIONS
    for (let i = 0; i < 3; i++) {
      members.push(await member(name, name))
    }
    await until('three share', share(...members))
    const producer = await producerOf()
    const messages = Array.from({ length: 600 }, (_, i) => ({ value: `${i}`, partition: i % PARTITIONS }))
    await producer.send({ topic: name, messages })
    const all = () => members.flatMap(each => each.messages.map(message => message.value.toString()))
    await until('all is read', () => new Set(all()).size === 600)
    await members[0].consumer.disconnect()
    await until('two share', share(members[1], members[2]))
    await members[1].consumer.disconnect()
    await members[2].consumer.disconnect()
    const [{ partitions }] = await admin.fetchOffsets({ groupId: name, topics: [name] })
    assert.deepEqual(partitions.map(each => each.offset), Array(PARTITIONS).fill('100'))
    const { groups: [described] } = await admin.describeGroups([name])
    assert.equal(described.state, 'Empty')
    await admin.deleteGroups([name])
  },

  async transactions() {
    await create(name, 1)
    await create(`${name}-copy`, 1)
    const producer = await producerOf({ transactionalId: name, maxInFlightRequests: 1, idempotent: true })
    for (const [number, commits] of [true, false, true].entries()) {
      const transaction = await producer.transaction()
      await transaction.send({ topic: name, messages: Array.from({ length: 10 }, (_, i) => ({ value: `${number}-${i}` })) })
      await (commits ? transaction.commit() : transaction.abort())
    }
    const values = (await read(name, 20)).map(each => each.value.toString())
    assert.equal(values[9], '0-9')
    assert.equal(values[10], '2-0')
    const transaction = await producer.transaction()
    await transaction.send({ topic: `${name}-copy`, messages: values.map(value => ({ value })) })
    const topics = [{ topic: name, partitions: [{ partition: 0, offset: '33' }] }]
    await transaction.sendOffsets({ consumerGroupId: `${name}-group`, topics })
    await transaction.commit()
    const [{ partitions }] = await admin.fetchOffsets({ groupId: `${name}-group`, topics: [name] })
    assert.equal(partitions[0].offset, '33')
    assert.equal((await read(`${name}-copy`, 20))[19].value.toString(), '2-9')
  },

  async admin() {
    await create(name, 2, [{ name: 'retention.ms', value: '60000' }])
    assert((await admin.listTopics()).includes(name))
    await admin.createPartitions({ topicPartitions: [{ topic: name, count: 4 }] })
    const { topics: [topic] } = await admin.fetchTopicMetadata({ topics: [name] })
    assert.equal(topic.partitions.length, 4)
    const changed = [{ type: 2, name, configEntries: [{ name: 'retention.ms', value: '70000' }] }]
    await admin.alterConfigs({ validateOnly: false, resources: changed })
    const wanted = [{ type: 2, name, configNames: ['retention.ms'] }]
    const { resources: [{ configEntries }] } = await admin.describeConfigs({ resources: wanted, includeSynonyms: false })
    assert.equal(configEntries[0].configValue, '70000')
    const producer = await producerOf()
    await producer.send({ topic: name, messages: [{ value: 'a', partition: 0 }, { value: 'b', partition: 0 }] })
    await admin.deleteTopicRecords({ topic: name, partitions: [{ partition: 0, offset: '1' }] })
    const offsets = (await admin.fetchTopicOffsets(name)).find(each => each.partition === 0)
    assert.equal(offsets.low, '1')
    assert.equal((await admin.describeCluster()).brokers.length, 1)
    assert.deepEqual((await admin.listPartitionReassignments({})).topics, [])
    await assert.rejects(admin.describeAcls({
      resourceType: 2, resourceName: name, resourcePatternType: 3, principal: 'User:a', host: '*', operation: 3, permissionType: 3,
    }), { type: 'SECURITY_DISABLED' })
    await admin.deleteTopics({ topics: [name] })
    assert(!(await admin.listTopics()).includes(name))
  },

  async reset() {
    await create(name, 1)
    const producer = await producerOf()
    await producer.send({ topic: name, messages: Array.from({ length: 10 }, (_, i) => ({ value: `${i}` })) })
    await read(name, 10, name)
    await admin.setOffsets({ groupId: name, topic: name, partitions: [{ partition: 0, offset: '4' }] })
    assert.equal((await read(name, 6, name))[0].value.toString(), '4')
    await admin.resetOffsets({ groupId: name, topic: name, earliest: true })
    assert.equal((await read(name, 10, name))[0].value.toString(), '0')
  },

  // Where a group begins that has no offset, or one that is gone, or one that holds.
  async policy() {
    await create(name, 1)
    const producer = await producerOf()
    await producer.send({ topic: name, messages: Array.from({ length: 30 }, (_, i) => ({ value: `${i}` })) })
    assert.equal((await admin.fetchTopicOffsets(name))[0].high, '30')
    await admin.deleteTopicRecords({ topic: name, partitions: [{ partition: 0, offset: '12' }] })
    for (const fromBeginning of [true, false]) {
      for (const committed of [null, 3, 20]) {
        const groupId = `${name}-${fromBeginning}-${committed}`
        if (committed !== null) {
          await admin.setOffsets({ groupId, topic: name, partitions: [{ partition: 0, offset: `${committed}` }] })
        }
        const reader = await member(groupId, name, fromBeginning)
        const deadline = Date.now() + PATIENCE_MS
        while (reader.messages.length === 0) {
          assert(Date.now() < deadline, `${groupId} read nothing`)
          // Whoever begins at the end needs new messages.
          await producer.send({ topic: name, messages: [{ value: 'new' }] })
          await sleep(200)
        }
        await reader.consumer.disconnect()
        const first = Number(reader.messages[0].offset)
        if (committed === 20) {
          assert.equal(first, 20, groupId)
        } else if (fromBeginning) {
          assert.equal(first, 12, groupId)
        } else {
          assert(first >= 30, `${groupId} began at ${first}`)
        }
      }
    }
  },

  async partitions() {
    await create(name, MANY)
    const producer = await producerOf()
    await producer.send({ topic: name, messages: Array.from({ length: MANY }, (_, i) => ({ value: `${i}`, partition: i })) })
    for (const { partition, value } of await read(name, MANY)) {
      assert.equal(value.toString(), `${partition}`)
    }
  },
}

async function main() {
  await admin.connect()
  await scenarios[scenario]()
  await Promise.all(open.map(each => each.disconnect()))
  console.log('ok')
}

main().then(() => process.exit(0), error => {
  console.error(error)
  process.exit(1)
})
